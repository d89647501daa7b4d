"""Attention mass that every row received, summed over queries (H2O and every accumulated score)."""

from __future__ import annotations

from torch import Tensor

from kvfoundry.kernels.available import without_triton
from kvfoundry.kernels.column_sums import naive
from kvfoundry.visibility import Visibility

__all__ = ["column_sums"]

# Below so many queries a block of their logits is small, and the reference no slower.
_FEW = 32


def column_sums(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """As `naive.column_sums`, on a GPU by a kernel that writes no logits. lse: as in `fused.column_sums`."""
    rule = visibility.rule
    if (
        query.shape[2] >= _FEW
        and rule.chunked is None
        and visibility.unread_distance is None
        and without_triton(query.device) is None
    ):
        from kvfoundry.kernels.column_sums import fused

        return fused.column_sums(query, key, visibility, scaling=scaling, softcap=softcap, sinks=sinks, lse=lse)
    return naive.column_sums(query, key, visibility, scaling=scaling, softcap=softcap, sinks=sinks)
