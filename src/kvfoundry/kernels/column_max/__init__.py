"""The largest weight that any query spent on each row (KVzip)."""

from kvfoundry.kernels.column_max.naive import column_max

__all__ = ["column_max"]
