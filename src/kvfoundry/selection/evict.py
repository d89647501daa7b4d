"""One eviction of one layer: score, allocate, choose, dispose, gather."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from kvfoundry.layouts import keep_rows
from kvfoundry.layouts.base import Layout
from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.keep import kept_mask

if TYPE_CHECKING:
    from kvfoundry.method import Method


def evict(method: Method, layout: Layout, evidence: Evidence, rows: Tensor) -> Layout:
    """The layout after an eviction down to `rows` ([batch] per head on average); itself when nothing had to go.

    `evidence.rows` must be the view of `layout`.
    """
    if method.score is None:
        return layout
    view = evidence.rows
    if not bool((view.lengths > rows[:, None]).any()):
        return layout
    if method.granularity == "query_head" and evidence.groups > 1:
        layout = layout.expanded_heads(evidence.groups)
        view = layout.view()
        evidence = replace(evidence, rows=view)
    protected = method.protect.mask(view, evidence.seen, rows)
    scores = method.score(evidence)
    counts = method.heads.allocate(scores, view, rows, protected)
    slots = method.choose(scores, evidence, counts, protected)
    if method.dispose is not None:
        view = method.dispose(evidence, kept_mask(slots, view), scores)
    return keep_rows(view, slots, counts)
