"""CaM: a dropped value is added, in equal parts and by lot, to the values of the rows that follow it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvfoundry.layouts.base import Columns, RowsView
from kvfoundry.merging.base import Disposal
from kvfoundry.merging.nearest import at_slots, slots_of
from kvfoundry.selection.draws import Draws, HashedDraws

if TYPE_CHECKING:
    from kvfoundry.selection.evidence import Evidence

_COLUMN = "decode_attention_sum"


@dataclass(frozen=True)
class CamMerge(Disposal):
    """Each dropped value into the next `merge` kept rows, with probability a / mean(a of kept rows behind it).

    attention: "newest" query's weights, or their "sum" over the decoded tokens. mean_over: all kept rows "behind" the
    dropped one, or only the "merged" ones. divisor: the parts are 1 / `merge` always ("merge"), or 1 / their number
    where fewer rows follow ("count"). most: only so many dropped rows of a head, those with the best scores. prompt:
    act on rows dropped from the prompt too.
    """

    merge: int = 32
    attention: Literal["newest", "sum"] = "newest"
    mean_over: Literal["behind", "merged"] = "behind"
    divisor: Literal["merge", "count"] = "merge"
    most: int | None = None
    prompt: bool = True
    draws: Draws = field(default_factory=HashedDraws)

    @property
    def accumulates(self) -> bool:
        return self.attention == "sum"

    def observe(self, evidence: Evidence) -> Columns:
        if self.attention != "sum" or not evidence.decoding:
            return {}
        batch, _, count = evidence.column_sums.shape
        # Per query head, for the group reduction by maximum does not commute with the sum.
        received = evidence.column_sums.view(batch, evidence.rows.keys.shape[1], -1, count).transpose(2, 3)
        earlier = evidence.rows.columns.get(_COLUMN)
        return {_COLUMN: received if earlier is None else earlier + received}

    def __call__(self, evidence: Evidence, kept: Tensor, scores: Tensor) -> RowsView:
        rows = evidence.rows
        dropped = rows.valid & ~kept
        if not (self.prompt or evidence.decoding) or not bool(dropped.any()):
            return rows
        if self.most is not None:
            dropped = _best(dropped, scores, self.most)
        received = self._received(evidence)
        probability = merge_probability(received, kept, dropped, self.merge if self.mean_over == "merged" else None)
        merges = dropped & (self.draws(evidence.layer_idx, rows.head_positions) < probability)
        return replace(rows, values=spread(rows.values, kept, merges, self.merge, self.divisor == "count"))

    def _received(self, evidence: Evidence) -> Tensor:
        """[batch, heads, rows]: the attention that decides. Before the first decoded token the sum is the newest's."""
        column = evidence.rows.columns.get(_COLUMN) if self.attention == "sum" else None
        if column is None:
            return evidence.reduced(evidence.newest_attention)
        batch, heads, count, groups = column.shape
        return evidence.reduced(column.transpose(2, 3).reshape(batch, heads * groups, count))


def _best(dropped: Tensor, scores: Tensor, most: int) -> Tensor:
    """The `most` dropped rows of every head with the best scores, as a mask."""
    ranked = scores.float().expand(dropped.shape).masked_fill(~dropped, -torch.inf)
    rank = ranked.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return dropped & (rank < most)


def merge_probability(received: Tensor, kept: Tensor, dropped: Tensor, reach: int | None) -> Tensor:
    """Probability that a dropped row is merged: its attention over the mean of the kept rows behind it, within [0, 1].

    received: [batch, heads, rows]; kept, dropped: boolean like it. reach: how many kept rows the mean takes, None for
    all. Returns [batch, heads, rows], 0 where nothing is dropped or nothing behind it is kept.
    """
    # Sums over kept rows by differences of running sums, in float64 so that the difference is exact enough.
    kept_slots = slots_of(kept)
    sums = received.double().gather(2, kept_slots.clamp(min=0)).masked_fill(kept_slots < 0, 0.0).cumsum(dim=-1)
    sums = torch.cat([torch.zeros_like(sums[..., :1]), sums], dim=-1)
    before = kept.cumsum(dim=-1)
    last = kept.sum(dim=-1, keepdim=True).expand_as(before)
    stop = last if reach is None else torch.minimum(before + reach, last)
    count = stop - before
    mean = (sums.gather(2, stop) - sums.gather(2, before)) / count
    probability = torch.nan_to_num(received.double() / mean, nan=0.0, posinf=1.0).clamp(0.0, 1.0)
    return probability.masked_fill(~dropped | (count == 0), 0.0).float()


def spread(values: Tensor, kept: Tensor, merges: Tensor, merge: int, divide_by_count: bool = False) -> Tensor:
    """Values [batch, heads, rows, dim] in which each row of `merges` has been added to the next `merge` kept rows.

    Divided by `merge`, or by the number of rows that take part where that is smaller and `divide_by_count` is set.
    Rows are read before anything is added. Rows that take in nothing come back bit for bit.
    """
    source, targets = slots_of(merges), slots_of(kept)
    if source.shape[2] == 0 or targets.shape[2] == 0:
        return values
    batch, heads, _, dim = values.shape
    before = kept.cumsum(dim=-1).gather(2, source.clamp(min=0))
    last = kept.sum(dim=-1, keepdim=True)
    stop = torch.minimum(before + merge, last)
    count = stop - before
    present = (source >= 0) & (count > 0)
    divisor = count.clamp(min=1) if divide_by_count else torch.full_like(count, merge)
    parts = at_slots(values, source).double() / divisor[..., None] * present[..., None]
    # Each part starts at one kept row and ends before another: two marks each, then one running sum.
    width = targets.shape[2] + 1
    marks = torch.zeros(batch, heads, width, dim, dtype=torch.float64, device=values.device)
    begins, ends = (index[..., None].expand_as(parts) for index in (before, stop))
    added = marks.scatter_add(2, begins, parts).scatter_add(2, ends, -parts).cumsum(dim=2)[:, :, :-1]
    hits = torch.zeros(batch, heads, width, dtype=torch.long, device=values.device)
    hits = hits.scatter_add(2, before, present.long()).scatter_add(2, stop, -present.long()).cumsum(dim=2)[..., :-1]
    old = at_slots(values, targets)
    new = torch.where(hits[..., None] > 0, (old.double() + added).to(values.dtype), old)
    # Absent targets write to a row behind the last, which is cut off again.
    index = targets.masked_fill(targets < 0, values.shape[2])[..., None].expand_as(new)
    return torch.cat([values, values[:, :, :1]], dim=2).scatter(2, index, new)[:, :, :-1]


@dataclass(frozen=True)
class CamPrefill(Disposal):
    """KVCache-Factory's form: before the prompt is evicted, every row behind the start is spread over its followers.

    window: queries that decide, rows that take a part, and newest rows that are never spread. start: share of the
    prompt's rows that are never spread.
    """

    window: int
    start: float
    draws: Draws = field(default_factory=HashedDraws)

    def __call__(self, evidence: Evidence, kept: Tensor, scores: Tensor) -> RowsView:
        rows = evidence.rows
        if evidence.decoding:
            return rows
        received = evidence.reduced(evidence.window_attention).mean(dim=2)
        first = torch.tensor([[math.ceil(self.start * n) for n in row] for row in rows.lengths.tolist()])
        first, lengths = first.to(received.device), rows.lengths.to(received.device)
        probability = prefill_probability(received, first, lengths, self.window)
        merges = self.draws(evidence.layer_idx, rows.head_positions) < probability
        return replace(rows, values=cascaded(rows.values, merges, lengths, self.window))


def prefill_probability(received: Tensor, first: Tensor, lengths: Tensor, window: int) -> Tensor:
    """a_p / max(a of the first rows and of rows p ... p + window - 1) for first <= p < length - window, else 0.

    received: [batch, heads, rows]; first, lengths: [batch, heads]. Returns [batch, heads, rows].
    """
    slot = torch.arange(received.shape[2], device=received.device)
    inside = slot < lengths[..., None]
    received = received.masked_fill(~inside, 0.0)
    ahead = torch.nn.functional.pad(received, (0, window - 1)).unfold(2, window, 1).amax(dim=-1)
    start = received.masked_fill(slot >= first[..., None], 0.0).amax(dim=-1, keepdim=True)
    ratio = torch.nan_to_num(received / torch.maximum(ahead, start), nan=0.0, posinf=1.0).clamp(0.0, 1.0)
    return ratio.masked_fill((slot < first[..., None]) | (slot >= lengths[..., None] - window), 0.0)


def cascaded(values: Tensor, merges: Tensor, lengths: Tensor, window: int) -> Tensor:
    """Values in which, from the first row on, each row of `merges` was added to the next `window` rows, 1/window each.

    A row passes on what it took in before. The row itself stays as it is.
    """
    passed = values.float().clone()
    touched = torch.zeros_like(merges)
    for slot in merges.flatten(0, 1).any(dim=0).nonzero().flatten().tolist():
        stop = min(slot + 1 + window, values.shape[2])
        reach = merges[:, :, slot, None] & (torch.arange(slot + 1, stop, device=values.device) < lengths[..., None])
        passed[:, :, slot + 1 : stop] += passed[:, :, slot, None] / window * reach[..., None]
        touched[:, :, slot + 1 : stop] |= reach
    return torch.where(touched[..., None], passed.to(values.dtype), values)
