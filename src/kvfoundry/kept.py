"""Which rows of the text a cache still holds, per batch row: how many, and where they stand, in a short string."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfoundry.cache import KVCache

# Longest profile in characters; a longer text has several positions in one of them.
BINS = 1024


@dataclass(frozen=True)
class Kept:
    """What one batch row holds, over its full-attention layers.

    rows: mean per head and layer. share: the same over the tokens seen. profile: one digit per bin of positions, in the
    order of the text: 0 no head of any layer holds one of them, 9 every head holds them all, 1 to 8 eighths between.
    Bin i of b spans the positions from i * tokens // b up to (i + 1) * tokens // b. None when every row is held.
    """

    rows: float
    share: float
    profile: str | None


def kept_by_row(cache: KVCache) -> list[Kept]:
    """What every batch row of a cache that has seen tokens holds now."""
    layers = [layer for layer in cache.attention_layers if layer.rule.span is None]
    if not layers:  # windows only: no method acts, and there are no rows to count
        return [Kept(0.0, 1.0, None)] * cache.attention_layers[0].batch_size
    real = layers[0].real
    assert real is not None
    lengths = [layer.lengths for layer in layers]
    complete = torch.stack([(length == real[:, None]).all(dim=1) for length in lengths]).all(dim=0).tolist()
    rows = torch.stack([length.double().mean(dim=1) for length in lengths]).mean(dim=0).tolist()
    profiles: list[str | None] = [None] * len(complete)
    if not all(complete):
        profiles = list(_profiles(*_heads_holding([layer.positions for layer in layers], int(real.max())), real))
    return [
        Kept(row, row / max(tokens, 1), None if whole else profile)
        for row, tokens, whole, profile in zip(rows, real.tolist(), complete, profiles, strict=True)
    ]


def _heads_holding(positions: list[Tensor], tokens: int) -> tuple[Tensor, int]:
    """How many heads of all layers hold each position, [batch, tokens] on the CPU, and how many there are.

    positions: per layer [batch, heads, rows], below `tokens`, -1 where a head has no row. A layer that keeps one set
    per KV head counts as often as one that keeps a set per query head.
    """
    most = max(layer.shape[1] for layer in positions)
    held: dict[torch.device, Tensor] = {}
    for layer in positions:
        if layer.device not in held:
            held[layer.device] = torch.zeros(layer.shape[0], tokens + 1, dtype=torch.int32, device=layer.device)
        places = (layer + 1).flatten(1)  # an absent row counts for the slot in front, which is cut off
        each = torch.full_like(places, most // layer.shape[1], dtype=torch.int32)
        held[layer.device].scatter_add_(1, places, each)
    return sum(counts.cpu().long() for counts in held.values())[:, 1:], most * len(positions)  # type: ignore[index]


def _profiles(held: Tensor, heads: int, real: Tensor) -> Iterator[str]:
    """The profile of every batch row. held: [batch, tokens], heads that hold each; real: [batch] tokens."""
    total = torch.nn.functional.pad(held.cumsum(1), (1, 0))
    for row, tokens in zip(total, real.tolist(), strict=True):
        bins = min(tokens, BINS)
        edges = torch.arange(bins + 1) * tokens // bins
        sums, full = row[edges].diff(), edges.diff() * heads
        digits = torch.where(sums == full, 9, torch.where(sums == 0, 0, 1 + 8 * sums // full))
        yield (digits + ord("0")).to(torch.uint8).numpy().tobytes().decode()
