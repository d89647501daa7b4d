"""Attention over rows that come part by part: a running softmax, so that no part has to be seen twice."""

from kvfoundry.kernels.running_attention.naive import TILE, RunningAttention

__all__ = ["TILE", "RunningAttention"]
