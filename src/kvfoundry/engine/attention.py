"""Attention of one new token per sequence over static rows: in Triton on a GPU, in torch elsewhere."""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch
from torch import Tensor

from kvfoundry.engine.rows import StaticRows
from kvfoundry.kernels.attention import sdpa
from kvfoundry.kernels.store_row import naive as store_naive
from kvfoundry.visibility import Visibility


class Kernels(Protocol):
    """How rows are stored and read."""

    def store(self, rows: StaticRows, key: Tensor, value: Tensor, position: Tensor) -> None:
        """Put one row per head at its slot. key, value: [batch, heads or a divisor, 1, dim]; position: [batch]."""

    def attend(
        self, rows: StaticRows, query: Tensor, *, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Output [batch, query_heads, 1, value_dim] over all rows of every head; query alike."""


class TorchKernels:
    """Operations of torch, of fixed shape; on the CPU, where a look at a length is free, no longer than needed."""

    def store(self, rows: StaticRows, key: Tensor, value: Tensor, position: Tensor) -> None:
        store_naive.store(key, value, position, rows.keys, rows.values, rows.positions, **_places(rows))

    def attend(
        self, rows: StaticRows, query: Tensor, *, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        width, complete = rows.width, False
        if query.device.type == "cpu":
            width = int(rows.lengths.max())
            complete = bool((rows.lengths == width).all())
        number = torch.arange(width, device=query.device)
        where = torch.where(number < rows.lengths[..., None], 0, -1)
        visibility = Visibility(where.new_zeros(query.shape[0], 1), where, "full" if complete else "masked")
        keys, values = (rows.gathered(flat)[:, :, :width] for flat in (rows.keys, rows.values))
        return sdpa.attend(query, keys, values, visibility, scaling=scaling, softcap=softcap, sinks=sinks)


class TritonKernels:
    """The fused kernels: one launch stores, two read, and nothing is asked of the host."""

    def __init__(self) -> None:
        from kvfoundry.kernels.decode_attention import fused as decode
        from kvfoundry.kernels.store_row import fused as store

        self._decode, self._store = decode, store

    def store(self, rows: StaticRows, key: Tensor, value: Tensor, position: Tensor) -> None:
        self._store.store(key, value, position, rows.keys, rows.values, rows.positions, **_places(rows))

    def attend(
        self, rows: StaticRows, query: Tensor, *, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        output = self._decode.attend(
            query, rows.keys, rows.values, rows.lengths,
            starts=rows.starts, scaling=scaling, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        assert isinstance(output, Tensor)
        return output


def _places(rows: StaticRows) -> dict[str, Tensor]:
    return {name: getattr(rows, name) for name in ("starts", "slots", "lengths", "capacities", "wraps")}


def without_triton(device: torch.device) -> str | None:
    """Why the fused kernels cannot run on a device; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'kvfoundry[kernels]')"
    from kvfoundry.kernels.triton_support import interpreted

    if device.type != "cuda" and not interpreted():
        return f"Triton needs a CUDA device, and the model is on {device.type}"
    return None


def kernels_for(device: torch.device) -> Kernels:
    """The fastest kernels of a device."""
    fused = device.type == "cuda" and without_triton(device) is None
    return TritonKernels() if fused else TorchKernels()
