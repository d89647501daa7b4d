"""Attention of one query per sequence over chosen pages of every head's rows."""

from kvfoundry.kernels.paged_attention.naive import attend

__all__ = ["attend"]
