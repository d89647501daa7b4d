"""Attention mass that every row received, summed over queries (H2O and every accumulated score)."""

from kvfoundry.kernels.column_sums.naive import column_sums

__all__ = ["column_sums"]
