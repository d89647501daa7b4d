"""One pool of rows for several heads: the best scores of all of them stay, wherever they are."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfoundry.devices import carried
from kvfoundry.selection.budgets import HeadBudget
from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.keep import ranking


def pooled_counts(
    scores: Sequence[Tensor], protected: Sequence[Tensor], valid: Sequence[Tensor], total: Tensor
) -> list[Tensor]:
    """Rows that every head keeps when the best `total` rows of all heads together stay.

    scores, protected, valid: one [batch, heads, rows] per layer; total: [batch] rows for all of them, on the CPU.
    Protected rows come first. Returns one [batch, heads] per layer, on the CPU. A batch row has a pool of its own.
    """
    device = scores[0].device
    sizes = [layer.shape[1] * layer.shape[2] for layer in scores]
    flat = torch.cat([layer.flatten(1).float().to(device) for layer in scores], dim=1)
    flat = torch.nan_to_num(flat, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    rank = torch.cat(
        [torch.where(p, 2, v.int()).flatten(1).to(device) for p, v in zip(protected, valid, strict=True)], 1
    )
    order = ranking(flat, rank).argsort(dim=1, descending=True)
    taken = torch.arange(order.shape[1], device=device) < carried(total, device)[:, None]
    chosen = torch.zeros_like(taken).scatter(1, order, taken) & (rank > 0)
    parts = chosen.split(sizes, dim=1)
    return [part.view_as(layer).sum(dim=-1).cpu() for part, layer in zip(parts, scores, strict=True)]


@dataclass(frozen=True)
class PooledHeads(HeadBudget):
    """The heads of a layer share one pool: a head keeps as many rows as it has among the layer's best."""

    def allocate(self, scores: Tensor, evidence: Evidence, rows: Tensor, protected: Tensor) -> Tensor:
        total = rows * protected.shape[1]
        return pooled_counts([scores.expand_as(protected)], [protected], [evidence.rows.valid], total)[0]


@dataclass(frozen=True, eq=False)
class GivenHeads(HeadBudget):
    """Rows per head that were settled elsewhere: [batch, heads] on the CPU."""

    counts: Tensor

    def allocate(self, scores: Tensor, evidence: Evidence, rows: Tensor, protected: Tensor) -> Tensor:
        return torch.minimum(self.counts, evidence.rows.lengths)
