"""One eviction of one layer: score, allocate, choose, dispose, gather."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfoundry.layouts.base import Layout, RowsView
from kvfoundry.layouts.dense import DenseRows
from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.keep import kept_mask

if TYPE_CHECKING:
    from kvfoundry.method import Method


# Told which rows go: the rows, a boolean mask [batch, heads, rows], and how many per head [batch, heads] on the CPU.
Leaving = Callable[[RowsView, Tensor, Tensor], None]


def evict(method: Method, layout: Layout, evidence: Evidence, rows: Tensor, leaving: Leaving | None = None) -> Layout:
    """The layout after an eviction down to `rows` ([batch] per head on average); itself when nothing had to go.

    `evidence.rows` must be the view of `layout`. leaving: called with the rows of a method that parks them.
    """
    if method.score is None:
        return layout
    unchanged, view = layout, evidence.rows
    if method.heads.settled(evidence, rows):
        return layout
    if method.granularity == "query_head" and evidence.groups > 1:
        layout = layout.expanded_heads(evidence.groups)
        view = layout.view()
        evidence = replace(evidence, rows=view, memo=None)
    if method.block is None:
        slots, counts, scores = _chosen(method, evidence, rows)
    else:
        slots, counts = _chosen_by_block(method, evidence, rows, method.block)
        scores = _scores(method, evidence)
    if bool((counts >= view.lengths).all()):
        return unchanged
    if method.dispose is not None:
        kept = kept_mask(slots, view)
        if method.parks and leaving is not None:
            leaving(view, view.valid & ~kept, view.lengths - counts)
        view = method.dispose(evidence, kept, scores)
    return layout.kept(view, slots, counts)


def _chosen(method: Method, evidence: Evidence, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of the rows that stay [batch, heads, widest], how many per head [batch, heads], and their scores."""
    view = evidence.rows
    protected = method.protect.mask(view, evidence.seen, rows)
    scores = _scores(method, evidence)
    if method.unit is None:
        counts = method.heads.allocate(scores, evidence, rows, protected)
    else:
        scores, counts = method.unit(scores, view, rows, protected)
    if method.refine is not None:
        scores = method.refine(scores, evidence, counts, protected)
    return method.choose(scores, evidence, counts, protected), counts, scores


def _scores(method: Method, evidence: Evidence) -> Tensor:
    assert method.score is not None
    key = "scores", method.score, method.granularity, method.group
    return evidence.once(key, partial(method.score, evidence))


def _chosen_by_block(method: Method, evidence: Evidence, rows: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """As `_chosen`, where rows enter the contest `block` at a time and losers never come back.

    The first `rows` rows of a head start as kept; each block of further rows is ranked together with those kept so far.
    """
    view = evidence.rows
    counts = torch.minimum(view.lengths, rows[:, None])
    widest = torch.arange(int(counts.max()))
    slots = widest.where(widest < counts[..., None], -1).to(view.keys.device)
    entered = counts
    while bool((entered < view.lengths).any()):
        upto = torch.minimum(entered + block, view.lengths)
        new = entered[..., None] + torch.arange(block)
        new = new.where(new < upto[..., None], -1).to(slots.device)
        slots = torch.cat([slots, new], dim=-1)
        # Absent slots to the end, so that the candidates are rows in order again.
        beyond = view.keys.shape[2]
        slots = slots.masked_fill(slots < 0, beyond).sort(dim=-1).values
        slots = slots.masked_fill(slots == beyond, -1)
        present = (slots >= 0).sum(dim=-1).cpu()
        slots = slots[..., : int(present.max())]
        candidates = DenseRows.gathered(view, slots, present).view()
        chosen, counts, _ = _chosen(method, replace(evidence, rows=candidates, memo=None), rows)
        slots = slots.gather(-1, chosen.clamp(min=0)).masked_fill(chosen < 0, -1)
        entered = upto
    return slots, counts
