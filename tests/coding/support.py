"""Layers under a codec, fed by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfoundry.layer import CacheLayer
from kvfoundry.layouts import CodedRows
from kvfoundry.method import Method
from kvfoundry.prompt_mask import PromptMask

SPECS = [
    "int8(group=16)",
    "int4(group=16, keys=tokens, residual=8)",
    "int2(group=16, mode=symmetric_full)",
    "int4(group=16, mode=zero_point, values=tokens)",
    "fp8",
    "fp8(group=16, residual=5)",
    "kivi(bits=2, group=16, residual=32)",
    "kivi(bits=4, group=16, residual=32, flow=paper)",
    "rotate()+int4(group=16)",
]


def rows_of(batch: int, tokens: int, dim: int = 32, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Query with 4 heads, keys and values with 2: [batch, heads, tokens, dim]."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, heads, tokens, dim, generator=generator).to(dtype) for heads in (4, 2, 2))


def feed(
    spec: str | Method, rows: Any, pieces: list[int], mask: Tensor | None = None, prompt: int | None = None
) -> Any:
    """A layer that got the rows in pieces; `prompt` announces how many of them are the prompt."""
    query, key, value = rows
    layer, start = CacheLayer(Method.parse(spec)), 0
    layer.prompt.tokens = prompt
    for size in pieces:
        part = slice(start, start + size)
        layer.update(key[:, :, part], value[:, :, part])
        layer.attend(query[:, :, part], PromptMask(attention_mask=None if mask is None else mask[:, : part.stop]))
        start += size
    return layer


def parts(layer: CacheLayer) -> dict[str, Tensor]:
    """Every tensor of coded rows, by name."""
    rows = layer.rows
    assert isinstance(rows, CodedRows)
    found = {"positions": rows.view().positions, "lengths": rows.lengths}
    for name, side in (("keys", rows.keys), ("values", rows.values)):
        found |= {f"{name}.{part}": getattr(side, part) for part in ("first", "tail", "counts", "tails", "blocks")}
        for kind in ("rows", "tables", "fixed"):
            found |= {f"{name}.{kind}.{part}": tensor for part, tensor in getattr(side, kind).items()}
        if side.block_of is not None:
            found[f"{name}.block_of"] = side.block_of
    # A head without coded rows may have no such tensor yet, or an empty one.
    return {name: tensor for name, tensor in found.items() if tensor.numel()}


def assert_same_parts(left: CacheLayer, right: CacheLayer) -> None:
    """Bitwise the same tensors, so the same codes, tables, tails, and bytes."""
    mine, other = parts(left), parts(right)
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name
    assert left.nbytes == right.nbytes
