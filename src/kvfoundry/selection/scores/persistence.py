"""Persistence of importance (Scissorhands): how rows fared with the queries of a history window."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfoundry.layouts.base import Columns
from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.scores.base import Score

_COLUMN = "importance"


@dataclass(frozen=True)
class AboveAverage(Score):
    """Minus the number of the last `queries` queries that gave a row less than their average attention.

    The average of a query is 1 / (rows it sees). Rows that came after a query are not judged by it. Among equal counts
    the row with more attention stays: its mean over the window, at most 1, is added.
    """

    queries: int = 32

    @property
    def window(self) -> int:
        return self.queries

    def __call__(self, evidence: Evidence) -> Tensor:
        weights = evidence.window_attention
        query, key = evidence.window_positions[:, None, :, None], evidence.rows.head_positions[:, :, None, :]
        seen = evidence.reading.rule.allows(query, key) & (key >= 0) & (query >= 0)
        average = 1.0 / seen.sum(dim=-1, keepdim=True).clamp(min=1)
        groups = evidence.groups
        below = (weights < average.repeat_interleave(groups, dim=1)) & seen.repeat_interleave(groups, dim=1)
        return evidence.reduced(weights.mean(dim=2) - below.sum(dim=2))


@dataclass(frozen=True)
class HistorySum(Score):
    """Running importance: importance x `decay` + attention of the last `history` queries of each call (None: all)."""

    history: int | None = None
    decay: float = 1.0

    @property
    def accumulates(self) -> bool:
        return True

    @property
    def sums_columns(self) -> bool:
        return self.history is None

    def observe(self, evidence: Evidence) -> Columns:
        evidence = _latest(evidence, self.history)
        batch, _, count = evidence.column_sums.shape
        received = evidence.column_sums.view(batch, evidence.rows.keys.shape[1], -1, count).transpose(2, 3)
        earlier = evidence.rows.columns.get(_COLUMN)
        return {_COLUMN: received if earlier is None else earlier * self.decay + received}

    def __call__(self, evidence: Evidence) -> Tensor:
        batch, heads, count, groups = evidence.rows.columns[_COLUMN].shape
        return evidence.reduced(evidence.rows.columns[_COLUMN].transpose(2, 3).reshape(batch, heads * groups, count))


def _latest(evidence: Evidence, history: int | None) -> Evidence:
    """The evidence of each sequence's last `history` real queries of this call."""
    positions = evidence.query_positions
    if history is None or positions.shape[1] <= history:
        return evidence
    real = (positions >= 0).sum(dim=1, keepdim=True)
    index = real - history + torch.arange(history, device=positions.device)
    positions = positions.gather(1, index.clamp(min=0)).masked_fill(index < 0, -1)
    wide = index.clamp(min=0)[:, None, :, None].expand(-1, evidence.query.shape[1], -1, evidence.query.shape[3])
    return replace(evidence, query=evidence.query.gather(2, wide), query_positions=positions, own=False)
