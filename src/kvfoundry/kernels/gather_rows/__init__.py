"""Compaction: the kept rows of every head moved into memory of their own.

`naive` says what is computed; `fused` moves keys, values and positions in one launch and asks the host nothing.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from kvfoundry.kernels.available import without_triton
from kvfoundry.kernels.gather_rows import naive

__all__ = ["Rows", "rectangle", "stretches"]

Rows = naive.Rows


def rectangle(rows: Rows, slots: Tensor) -> Rows:
    """As `naive.rectangle`, on a GPU by the kernel."""
    kept: Rows = _twin(rows, slots).rectangle(rows, slots)
    return kept


def stretches(rows: Rows, slots: Tensor, counts: Tensor) -> Rows:
    """As `naive.stretches`, on a GPU by the kernel."""
    kept: Rows = _twin(rows, slots).stretches(rows, slots, counts)
    return kept


def _twin(rows: Rows, slots: Tensor) -> ModuleType:
    dense = all(part.stride(-1) == 1 for part in rows)
    if slots.numel() == 0 or not dense or without_triton(slots.device) is not None:
        return naive
    from kvfoundry.kernels.gather_rows import fused

    return fused
