"""Attention of a prompt over an index: which blocks of rows, and which single rows, every tile of queries reads."""

from typing import Any

from torch import Tensor

from kvfoundry.kernels.available import without_triton
from kvfoundry.kernels.sparse_prefill import naive
from kvfoundry.kernels.sparse_prefill.index import BlockIndex, Tiles

__all__ = ["BlockIndex", "Tiles", "attend"]

# Rows of the smallest tile that tensor cores take.
_LEAST_TILE = 16


def attend(query: Tensor, key: Tensor, value: Tensor, index: BlockIndex, **terms: Any) -> Tensor:
    """As `naive.attend`; on a CUDA device with Triton by the kernel, which leaves out what the index does not name."""
    if index.tiles.key_block >= _LEAST_TILE and without_triton(query.device) is None:
        from kvfoundry.kernels.sparse_prefill import fused

        return fused.attend(query, key, value, index, **terms)
    return naive.attend(query, key, value, index, **terms)
