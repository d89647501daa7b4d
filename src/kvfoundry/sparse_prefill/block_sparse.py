"""Block-sparse: every tile reads the blocks whose mean key agrees most with its mean query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvfoundry.checks import whole
from kvfoundry.kernels.sparse_prefill import BlockIndex, Tiles
from kvfoundry.sparse_prefill.patterns import Pattern, Sight, piece


@dataclass(frozen=True)
class BlockSparse(Pattern):
    """Every tile of queries reads `blocks` blocks, those of the tile itself always among them."""

    blocks: int = 100

    def __post_init__(self) -> None:
        whole("blocks", self.blocks, least=1)

    def whole(self, tiles: Tiles) -> bool:
        return self.blocks >= tiles.blocks

    @classmethod
    def index(cls, sight: Sight, heads: Tensor, patterns: Sequence[Self]) -> BlockIndex:
        tiles, device, batch = sight.tiles, sight.query.device, sight.query.shape[0]
        wanted = torch.tensor([max(pattern.blocks, tiles.ratio) for pattern in patterns], device=device)
        most = min(max(tiles.ratio, *(pattern.blocks for pattern in patterns)), tiles.blocks)
        keys, tops = sight.of_heads(_mean_keys(sight), heads), sight.of_heads(tiles.tops, heads)
        block = torch.arange(tiles.blocks, device=device)
        parts = []
        step = piece(sight, max(tiles.blocks, tiles.query_block * sight.query.shape[3]))
        for start in range(0, tiles.number, step):
            stop = min(start + step, tiles.number)
            queries = _mean_queries(sight, heads, start, stop)
            scores = torch.matmul(queries, keys.transpose(-1, -2)) * sight.scaling
            distance = tops[:, :, start:stop, None] - block
            scores = torch.where(distance < tiles.ratio, torch.inf, scores)
            scores = scores.masked_fill(distance < 0, -torch.inf)
            found = scores.topk(most, dim=-1)
            within = torch.arange(most, device=device) < wanted[:, None, None]
            there = within & (found.values > -torch.inf)
            chosen = tops[:, :, start:stop, None] - found.indices
            parts.append(torch.where(there, chosen, tiles.blocks).sort(dim=-1).values)
        distances = torch.cat(parts, dim=2)
        counts = (distances < tiles.blocks).sum(dim=-1)
        columns = distances.new_zeros(batch, len(patterns), 0)
        covered = torch.zeros(batch, len(patterns), tiles.blocks, dtype=torch.bool, device=device)
        return BlockIndex.of(tiles, tops, distances, counts, columns, covered)


def _mean_keys(sight: Sight) -> Tensor:
    """Mean of the keys of every block, zero for a block without rows: [batch, heads, blocks, head_dim] float32."""
    tiles, key = sight.tiles, sight.key
    at = torch.arange(key.shape[2], device=key.device)
    if tiles.shortest < key.shape[2]:
        key = key * (at < tiles.lengths[..., None])[..., None]
    complete = key.shape[2] // tiles.key_block * tiles.key_block
    sums = key[:, :, :complete].unflatten(2, (-1, tiles.key_block)).sum(dim=3, dtype=torch.float32)
    if complete < key.shape[2]:
        rest = key[:, :, complete:].sum(dim=2, keepdim=True, dtype=torch.float32)
        sums = torch.cat([sums, rest], dim=2)
    sums = torch.nn.functional.pad(sums, (0, 0, 0, tiles.blocks - sums.shape[2]))
    starts = torch.arange(tiles.blocks, device=key.device) * tiles.key_block
    counts = (tiles.lengths[..., None] - starts).clamp(min=1, max=tiles.key_block)
    return sums / counts[..., None]


def _mean_queries(sight: Sight, heads: Tensor, start: int, stop: int) -> Tensor:
    """Mean of the queries of some tiles: [batch, len(heads), stop - start, head_dim] float32."""
    tiles = sight.tiles
    first = sight.of_heads(tiles.first, heads)
    tile = first // tiles.query_block + start
    slot = tile[..., None] * tiles.query_block + torch.arange((stop - start) * tiles.query_block, device=heads.device)
    place = slot - first[..., None]
    real = (place >= 0) & (place < tiles.counts[:, None, None])
    index = place.clamp(min=0, max=sight.query.shape[2] - 1)[..., None].expand(-1, -1, -1, sight.query.shape[3])
    queries = sight.query.index_select(1, heads).gather(2, index) * real[..., None]
    sums = queries.unflatten(2, (-1, tiles.query_block)).sum(dim=3, dtype=torch.float32)
    return sums / real.unflatten(2, (-1, tiles.query_block)).sum(dim=-1).clamp(min=1)[..., None]
