"""Reference: the index written out as a mask, and attention under it in float32. It saves no work, and says what is
computed."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.kernels.attention.naive import query_block
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
    batch, query_heads, queries, _ = query.shape
    heads, rows = key.shape[1], key.shape[2]
    outputs = []
    step = query_block(query.device, batch, query_heads, rows)
    wide_keys, wide_values = key.float().transpose(-1, -2), value.float()
    for start in range(0, queries, step):
        part = query[:, :, start : start + step].float()
        width = part.shape[2]
        seen = visible(index, torch.arange(start, start + width, device=query.device), rows)
        logits = torch.matmul(part.reshape(batch, heads, -1, part.shape[3]), wide_keys) * scaling
        logits = logits.view(batch, query_heads, width, rows)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        logits = logits.masked_fill(~seen, torch.finfo(torch.float32).min)
        if sinks is not None:
            sink = sinks.float().reshape(1, query_heads, 1, 1).expand(batch, -1, width, 1)
            logits = torch.cat([logits, sink], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., :rows] * seen
        found = torch.matmul(weights.view(batch, heads, -1, rows), wide_values)
        outputs.append(found.view(batch, query_heads, width, -1).to(query.dtype))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
