"""Vertical-slash: rows that everybody reads, and distances at which everybody reads, seen by the newest queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from kvfoundry.checks import choice, whole
from kvfoundry.kernels.sparse_prefill import BlockIndex, Tiles
from kvfoundry.sparse_prefill.patterns import Pattern, Sight, block_distances, listed, piece

Rule = Literal["blocks", "offsets"]

# Above every sum of weights: what is always read comes first, the nearest offset before all others.
_ALWAYS = 1e6


@dataclass(frozen=True)
class VerticalSlash(Pattern):
    """The `vertical` rows and the `slash` distances with most attention from the last `window` queries of a call.

    The first `sinks` rows and the nearest `recent` distances are always among them. Blocks are read whole, so a slash
    line costs more than its own rows. rule "blocks": lines are taken, best first, until they cover as many blocks as
    `slash` distances side by side would. "offsets", as published: `slash` lines, in as many blocks as they fall.
    """

    vertical: int = 1000
    slash: int = 6096
    window: int = 64
    sinks: int = 30
    recent: int = 100
    rule: Rule = "blocks"

    def __post_init__(self) -> None:
        whole("vertical", self.vertical)
        whole("slash", self.slash, least=1)
        whole("window", self.window, least=1)
        whole("sinks", self.sinks)
        whole("recent", self.recent, least=1)
        choice("rule", self.rule, ("blocks", "offsets"))

    def whole(self, tiles: Tiles) -> bool:
        if self.rule == "offsets":
            return self.slash >= tiles.blocks * tiles.key_block
        return self.blocks(tiles) >= tiles.blocks

    def blocks(self, tiles: Tiles) -> int:
        """Blocks of a tile that `slash` distances side by side fall into."""
        return -(-self.slash // tiles.key_block) + tiles.ratio

    @classmethod
    def index(cls, sight: Sight, heads: Tensor, patterns: Sequence[Self]) -> BlockIndex:
        """Sizes differ from head to head, everything else is that of the first of the patterns."""
        tiles, common = sight.tiles, patterns[0]
        tops, lengths = sight.of_heads(tiles.tops, heads), sight.of_heads(tiles.lengths, heads)
        verticals, slashes = newest_attention(sight, common.window)
        if len(patterns) < sight.query_heads:
            verticals, slashes = verticals.index_select(1, heads), slashes.index_select(1, heads)
        beyond = tiles.blocks * tiles.key_block
        columns = _best_columns(verticals, [pattern.vertical for pattern in patterns], common.sinks, lengths, beyond)
        offset = torch.arange(slashes.shape[-1], device=slashes.device, dtype=slashes.dtype)
        slashes = torch.where(offset < common.recent, _ALWAYS - offset, slashes)
        if common.rule == "offsets":
            marked = _best(slashes, [pattern.slash for pattern in patterns])
            member, width = block_distances(marked.to(slashes.dtype), tiles) > 0, tiles.blocks
        else:
            counts = [pattern.blocks(tiles) for pattern in patterns]
            # a shorter head than others has no use for a block in front of its first row
            near = torch.arange(tiles.blocks, device=slashes.device) <= tops.amax(dim=-1, keepdim=True)
            scores = block_distances(slashes, tiles).masked_fill(~near, -torch.inf)
            member, width = _best(scores, counts) & near, min(max(counts), tiles.blocks)
        distances, counted = listed(member, tops, width)
        return BlockIndex.of(tiles, tops, distances, counted, columns, member)


def newest_attention(sight: Sight, window: int) -> tuple[Tensor, Tensor]:
    """How much attention the last `window` queries of every batch row give to every row, and at every distance.

    Both [batch, query_heads, blocks * key_block] float32, zeros where there is no row, or no such distance.
    """
    tiles, query = sight.tiles, sight.query
    batch, query_heads, queries, dim = query.shape
    heads, rows = sight.key.shape[1], sight.key.shape[2]
    count = min(window, queries)
    if tiles.even:
        last = query[:, :, -count:]
    else:
        place = (tiles.counts[:, None] - count + torch.arange(count, device=query.device)).clamp(min=0)
        last = query.gather(2, place[:, None, :, None].expand(-1, query_heads, -1, dim))
    # query r of the window stands at slot base + r; in a batch row with fewer queries the first ones are not there
    base = sight.expanded(tiles.lengths) - count
    own = base[..., None] + torch.arange(count, device=query.device)
    real = own >= sight.expanded(tiles.first)[..., None]
    packed = (last.float() * sight.scaling).to(query.dtype).reshape(batch, heads, -1, dim)
    step = piece(sight, count)

    def logits(start: int, stop: int) -> Tensor:
        found = torch.matmul(packed, sight.key[:, :, start:stop].transpose(-1, -2)).float()
        found = found.view(batch, query_heads, count, stop - start)
        if sight.softcap is not None:
            found = torch.tanh(found / sight.softcap) * sight.softcap
        if stop > tiles.shortest - count:
            at = torch.arange(start, stop, device=query.device)
            found = found.masked_fill(at > own[..., None], -torch.inf)
        return found

    pieces = [(start, min(start + step, rows)) for start in range(0, rows, step)]
    total = torch.full_like(own, -torch.inf, dtype=torch.float32)
    if sight.sinks is not None:
        total = sight.sinks.float().view(1, query_heads, 1).expand_as(own)
    for start, stop in pieces:
        total = torch.logaddexp(total, logits(start, stop).logsumexp(dim=-1))
    total = total.masked_fill(~real, torch.inf)
    verticals = torch.zeros(batch, query_heads, tiles.blocks * tiles.key_block, device=query.device)
    diagonals = torch.zeros(batch, query_heads, rows + count - 1, device=query.device)
    for start, stop in pieces:
        weights = (logits(start, stop) - total[..., None]).exp_()
        verticals[..., start:stop] = weights.sum(dim=2)
        diagonals[..., start : stop + count - 1] += _diagonal_sums(weights)
    # entry i of the diagonals sums over rows k and queries r with k - r = i - (count - 1), at distance base - (k - r)
    offset = torch.arange(verticals.shape[-1], device=query.device)
    place = base[..., None] + (count - 1) - offset
    slashes = diagonals.gather(2, place.clamp(min=0, max=rows + count - 2)) * (place >= 0)
    return verticals, slashes


def _diagonal_sums(weights: Tensor) -> Tensor:
    """Sums of [..., queries, rows] along rows - queries = const: [..., rows + queries - 1], from 1 - queries on."""
    *outer, queries, rows = weights.shape
    width = rows + 2 * queries - 2
    room = weights.new_zeros(*outer, queries, width + 1)
    room[..., queries - 1 : queries - 1 + rows] = weights
    # each line of the view begins one place further right than the line above, so diagonals stand below each other
    strides = (*room.stride()[:-2], width + 2, 1)
    return room.as_strided((*outer, queries, rows + queries - 1), strides).sum(dim=-2)


def _best(scores: Tensor, counts: list[int]) -> Tensor:
    """Boolean like scores: the counts[h] largest of every head h, the first of equal ones.

    Blocks that one line runs through are equal, and a batch must not decide which of them is taken.
    """
    most = min(max(counts), scores.shape[-1])
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :most]
    rank = torch.arange(most, device=scores.device)
    within = rank < torch.tensor(counts, device=scores.device)[:, None]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(2, best, within.expand_as(best))


def _best_columns(verticals: Tensor, counts: list[int], sinks: int, lengths: Tensor, beyond: int) -> Tensor:
    """The slots of the counts[h] rows with most attention, sinks first; `beyond` where there are fewer.

    lengths: [batch, query_heads] rows of every head.
    """
    slot = torch.arange(verticals.shape[-1], device=verticals.device)
    scores = torch.where(slot < sinks, _ALWAYS - slot, verticals)
    scores = torch.where(slot < lengths[..., None], scores, -1.0)
    most = min(max(counts), scores.shape[-1])
    found = scores.topk(most, dim=-1)
    within = torch.arange(most, device=scores.device) < torch.tensor(counts, device=scores.device)[:, None]
    return torch.where(within & (found.values >= 0), found.indices, beyond)
