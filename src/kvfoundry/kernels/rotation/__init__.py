"""Keys turned by tables of cosines and sines (RoPE): `naive` says what is computed, `fused` does it in one pass."""

from __future__ import annotations

from torch import Tensor

from kvfoundry.kernels.available import without_triton
from kvfoundry.kernels.rotation import naive
from kvfoundry.kernels.rotation.naive import Pairs

__all__ = ["Pairs", "turn"]


def turn(keys: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs, *, out: Tensor | None = None) -> Tensor:
    """As `naive.turn`, on a GPU by the kernel."""
    if keys.shape[2] == 0 or keys.stride(3) != 1 or without_triton(keys.device) is not None:
        return naive.turn(keys, cos, sin, pairs, out=out)
    from kvfoundry.kernels.rotation import fused

    return fused.turn(keys, cos, sin, pairs, out=out)
