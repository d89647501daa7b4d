"""Which rows of the text a cache still holds, per batch row: how many, and where they stand, in a short string."""

from __future__ import annotations

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
    complete = torch.stack([(length == real[:, None]).all(dim=1) for length in lengths]).all(dim=0)
    held, heads = (None, 0) if bool(complete.all()) else _heads_holding([layer.positions for layer in layers])
    found = []
    for row, tokens in enumerate(real.tolist()):
        rows = float(torch.stack([length[row].double().mean() for length in lengths]).mean())
        profile = None if held is None or complete[row] else _digits(held[row], heads, tokens)
        found.append(Kept(rows, rows / max(tokens, 1), profile))
    return found


def _heads_holding(positions: list[Tensor]) -> tuple[Tensor, int]:
    """How many heads of all layers hold each position, [batch, positions] on the CPU, and how many there are.

    positions: per layer [batch, heads, rows], -1 where a head has no row. A layer that keeps one set per KV head counts
    as often as one that keeps a set per query head.
    """
    most = max(layer.shape[1] for layer in positions)
    last = max(int(layer.max()) for layer in positions if layer.numel())
    held = torch.zeros(positions[0].shape[0], last + 2, dtype=torch.long)
    for layer in positions:
        places = (layer + 1).flatten(1)  # an absent row counts for the slot in front, which is cut off
        counts = torch.zeros(places.shape[0], last + 2, dtype=torch.long, device=layer.device)
        held += counts.scatter_add_(1, places, torch.ones_like(places)).cpu() * (most // layer.shape[1])
    return held[:, 1:], most * len(positions)


def _digits(held: Tensor, heads: int, tokens: int) -> str:
    """The profile of one batch row. held: [positions], heads that hold each."""
    bins, held = min(tokens, BINS), held[:tokens]
    total = torch.zeros(tokens + 1, dtype=torch.long)
    total[1 : held.numel() + 1] = held.cumsum(0)
    total[held.numel() + 1 :] = held.sum()  # the newest tokens may be held nowhere
    edges = torch.arange(bins + 1) * tokens // bins
    sums, full = total[edges].diff(), edges.diff() * heads
    digits = torch.where(sums == full, 9, torch.where(sums == 0, 0, 1 + 8 * sums // full))
    return "".join(map(str, digits.tolist()))
