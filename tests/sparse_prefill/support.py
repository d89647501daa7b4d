"""Prompts with structure: random queries and keys in which some heads look where they are told."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.kernels.sparse_prefill import Tiles, naive
from kvfoundry.sparse_prefill.patterns import Pattern, Sight
from kvfoundry.sparse_prefill.prefill import index_of


def sight_of(
    query_heads: int = 4,
    heads: int = 2,
    *,
    lengths: list[list[int]] | None = None,
    counts: list[int] | None = None,
    rows: int = 96,
    tile: int = 8,
    block: int = 4,
    seed: int = 0,
    **terms: object,
) -> Sight:
    """Random queries and keys; by default one batch row whose queries are all of its rows."""
    lengths, counts = lengths or [[rows] * heads], counts or [rows]
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(len(counts), query_heads, max(counts), 16, generator=generator)
    key = torch.randn(len(counts), heads, max(map(max, lengths)), 16, generator=generator)
    tiles = Tiles.of(torch.tensor(lengths), torch.tensor(counts), tile, block, "cpu")
    return Sight(query, key, tiles, 0.25, **terms)  # type: ignore[arg-type]


def seen_by(sight: Sight, *patterns: Pattern) -> Tensor:
    """What every query reads, [batch, query_heads, queries, rows], a pattern for each query head."""
    index = index_of(sight, patterns)
    return naive.visible(index, torch.arange(sight.query.shape[2]), sight.key.shape[2])


def pointing(rows: int, columns: list[int], offsets: list[int], strength: float = 30.0, seed: int = 0) -> Sight:
    """One head whose queries look at these rows, and at those so far behind them."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.nn.functional.normalize(torch.randn(rows, 256, generator=generator), dim=-1)
    shared = torch.nn.functional.normalize(torch.randn(256, generator=generator), dim=-1)
    key, query = own.clone(), shared.expand(rows, -1).clone()
    key[columns] = shared
    for offset in offsets:
        query[offset:] += own[: rows - offset]
    tiles = Tiles.of(torch.tensor([[rows]]), torch.tensor([rows]), 8, 4, "cpu")
    return Sight(query[None, None], key[None, None], tiles, strength)
