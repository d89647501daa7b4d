"""Attention that a row received from every query so far (H2O)."""

from dataclasses import dataclass

from torch import Tensor

from kvfoundry.layouts.base import Columns
from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.scores.base import Score

COLUMN = "attention_sum"


@dataclass(frozen=True)
class AccumulatedAttention(Score):
    """Column sums of the attention matrix over all queries, prompt and decode alike.

    normalize: divide by the number of queries that could see the row, which removes the head start of early tokens.
    """

    normalize: bool = False

    @property
    def accumulates(self) -> bool:
        return True

    @property
    def sums_columns(self) -> bool:
        return True

    def observe(self, evidence: Evidence) -> Columns:
        rows = evidence.rows
        if evidence.granularity == "kv_head" and evidence.group != "max":
            # Mean and sum commute with accumulation: one number per row and stored head is enough.
            received = evidence.reduced(evidence.column_sums)
        else:
            batch, _, count = evidence.column_sums.shape
            received = evidence.column_sums.view(batch, rows.keys.shape[1], evidence.groups, count).transpose(2, 3)
        earlier = rows.columns.get(COLUMN)
        return {COLUMN: received if earlier is None else earlier + received}

    def __call__(self, evidence: Evidence) -> Tensor:
        if evidence.rows.columns[COLUMN].dim() == 3:
            sums = evidence.rows.columns[COLUMN]
            return sums / evidence.ages().clamp(min=1) if self.normalize else sums
        batch, heads, count, groups = evidence.rows.columns[COLUMN].shape
        sums = evidence.rows.columns[COLUMN].transpose(2, 3).reshape(batch, heads * groups, count)
        if self.normalize:
            ages = evidence.ages().clamp(min=1).repeat_interleave(groups, dim=1)
            sums = sums / ages
        return evidence.reduced(sums)
