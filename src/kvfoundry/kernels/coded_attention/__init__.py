"""Attention over rows that are stored as codes."""

from kvfoundry.kernels.coded_attention.naive import RowSource, attend

__all__ = ["RowSource", "attend"]
