"""Reference: tile after tile, the rows that the index names are gathered, and attention over them is in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.kernels.sparse_prefill.index import BlockIndex


def visible(index: BlockIndex, queries: Tensor, rows: int) -> Tensor:
    """What some queries read: boolean [batch, query_heads, len(queries), rows].

    queries: numbers of queries within the call, the same for all batch rows; a batch row without such a query sees
    nothing.
    """
    tiles, query_heads = index.tiles, index.counts.shape[1]
    own = tiles.first[..., None] + queries
    tile = own // tiles.query_block - (tiles.first // tiles.query_block)[..., None]
    real = queries < tiles.counts[:, None]
    own, tile, tops = (tiles.per_query_head(tensor, query_heads) for tensor in (own, tile, tiles.tops))
    tile = tile.clamp(max=tiles.number - 1)
    top, count = tops.gather(2, tile), index.counts.long().gather(2, tile)
    distances = index.distances.expand(-1, -1, tiles.number, -1).long()
    distances = distances.gather(2, tile[..., None].expand(-1, -1, -1, distances.shape[-1]))
    blocks = top[..., None] - distances
    listed = (torch.arange(distances.shape[-1], device=blocks.device) < count[..., None]) & (blocks >= 0)
    marks = torch.zeros(*tile.shape, tiles.blocks + 1, dtype=torch.bool, device=blocks.device)
    marks.scatter_(3, torch.where(listed, blocks, tiles.blocks), True)
    marks |= (count == top + 1)[..., None]
    seen = marks[..., : tiles.blocks].repeat_interleave(tiles.key_block, dim=3)[..., :rows]
    single = torch.zeros(*tile.shape, rows + 1, dtype=torch.bool, device=blocks.device)
    chosen = index.single.gather(2, tile[..., None].expand(-1, -1, -1, index.single.shape[-1]))
    single.scatter_(3, index.columns.long().clamp(max=rows)[:, :, None].expand_as(chosen), chosen)
    at = torch.arange(rows, device=blocks.device)
    seen = torch.nn.functional.pad(seen, (0, rows - seen.shape[-1])) | single[..., :rows]
    lengths = tiles.per_query_head(tiles.lengths, query_heads)
    return seen & (at <= own[..., None]) & (at < lengths[..., None, None]) & real[:, None, :, None]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: BlockIndex,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention output [batch, query_heads, queries, value_dim] of a prompt's queries over the rows of an index.

    query: [batch, query_heads, queries, head_dim], real ones first; key, value: [batch, heads, rows, dim]. The queries
    are the last rows of every head (see `Tiles`); each sees those in front of it and itself, as far as its tile reads
    them. Queries that a batch row does not have give zeros. softcap, sinks [query_heads]: as in `decode_attention`.
    """
    tiles, (batch, query_heads, queries, dim) = index.tiles, query.shape
    device = query.device
    first = tiles.per_query_head(tiles.first, query_heads)
    counts, step = tiles.counts[:, None, None], torch.arange(tiles.query_block, device=device)
    numbers = torch.arange(batch, device=device)[:, None, None]
    stored = (torch.arange(query_heads, device=device) // (query_heads // key.shape[1]))[:, None]
    # one place more, for what a batch row has no query for
    output = query.new_zeros(batch, query_heads, queries + 1, value.shape[3])
    for tile in range(tiles.number):
        slot = ((first // tiles.query_block + tile) * tiles.query_block)[..., None] + step
        place = slot - first[..., None]
        real = (place >= 0) & (place < counts)
        place = torch.where(real, place, queries)
        rows, there = _rows_of(index, tile)
        part = query.gather(2, place.clamp(max=queries - 1)[..., None].expand(-1, -1, -1, dim))
        logits = torch.matmul(part.float(), key[numbers, stored, rows].float().transpose(-1, -2)) * scaling
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        logits = logits.masked_fill(~(there[:, :, None] & (rows[:, :, None] <= slot[..., None])), -torch.inf)
        if sinks is not None:
            sink = sinks.float().reshape(1, query_heads, 1, 1).expand(batch, -1, tiles.query_block, 1)
            logits = torch.cat([logits, sink], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., : rows.shape[2]]
        found = torch.matmul(weights, value[numbers, stored, rows].float()).to(query.dtype)
        output.scatter_(2, place[..., None].expand_as(found), found)
    return output[:, :, :queries]


def _rows_of(index: BlockIndex, tile: int) -> tuple[Tensor, Tensor]:
    """Slots that one tile of every head reads, [batch, query_heads, width], and which of them are there."""
    tiles = index.tiles
    lengths = tiles.per_query_head(tiles.lengths, index.counts.shape[1])[..., None]
    top, count = tiles.per_query_head(tiles.tops, index.counts.shape[1])[..., tile, None], index.counts[..., tile, None]
    width = int(count.max())
    place = torch.arange(width, device=lengths.device)
    listed = index.distances[:, :, min(tile, index.distances.shape[2] - 1), :width].long()
    listed = torch.nn.functional.pad(listed, (0, width - listed.shape[-1]))
    blocks = top - torch.where(count == top + 1, place, listed)
    rows = blocks[..., None] * tiles.key_block + torch.arange(tiles.key_block, device=lengths.device)
    there = (place < count)[..., None] & (rows >= 0)
    rows = torch.cat([rows.flatten(2), index.columns.long()], dim=2)
    there = torch.cat([there.flatten(2), index.single[:, :, tile]], dim=2) & (rows < lengths)
    return torch.where(there, rows, 0), there
