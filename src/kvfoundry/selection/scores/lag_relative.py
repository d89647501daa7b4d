"""Spread of a row's channels relative to the range of the rows that follow (LagKV)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfoundry.devices import carried
from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.scores.base import Score


@dataclass(frozen=True)
class LagRelative(Score):
    """Rows behind the first `sinks` form partitions of `lag` rows, each judged against the next one.

    The rows of the last full partition and those behind it have no reference yet: they rank above all others, the
    newest first. cross_scoring: compare the scores of different partitions; else a row's score is its rank inside its
    own partition, so that every partition keeps the same share.
    """

    sinks: int = 4
    lag: int = 128
    cross_scoring: bool = False

    def __call__(self, evidence: Evidence) -> Tensor:
        rows = evidence.rows
        count = rows.keys.shape[2]
        device = rows.keys.device
        # Partitions are counted in stored rows: what is gone cannot be a reference.
        lengths = carried(rows.lengths, device)[..., None]
        slot = torch.arange(count, device=device)
        scores = (1.0 + slot / max(1, count)).expand(*lengths.shape[:2], -1).clone()
        partitions = (count - self.sinks) // self.lag
        if partitions < 2:
            return scores
        span = slice(self.sinks, self.sinks + partitions * self.lag)
        judged = (self._spread(rows.keys, span) + self._spread(rows.values, span)) / 2
        if not self.cross_scoring:
            judged = judged.argsort(dim=-1).argsort(dim=-1).float() / self.lag
        full = ((lengths - self.sinks) // self.lag).clamp(min=0)
        has_reference = torch.arange(partitions - 1, device=device) < full - 1
        inside = has_reference.repeat_interleave(self.lag, dim=-1)
        target = scores[..., self.sinks : self.sinks + (partitions - 1) * self.lag]
        target.copy_(torch.where(inside, judged.flatten(2), target))
        return scores

    def _spread(self, rows: Tensor, span: slice) -> Tensor:
        """Softmax over each partition, all but the last, of the channels' spread: [batch, heads, partitions, lag]."""
        batch, heads, _, dim = rows.shape
        parts = rows[:, :, span].float().reshape(batch, heads, -1, self.lag, dim)
        reference = parts[:, :, 1:]
        low, high = reference.amin(dim=3, keepdim=True), reference.amax(dim=3, keepdim=True)
        extent = high - low
        # A channel that does not vary says nothing, and must not turn the row's score into infinity.
        scaled = (parts[:, :, :-1] - low) / extent.where(extent > 0, torch.inf)
        return scaled.std(dim=-1).softmax(dim=-1)
