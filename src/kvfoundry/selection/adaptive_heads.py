"""Rows of a layer to the heads whose scores need them (AdaKV)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvfoundry.devices import carried
from kvfoundry.selection.budgets import HeadBudget, UniformHeads
from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.keep import comparable, ranking
from kvfoundry.selection.shares import shared_out

Rule = Literal["exact", "kvcache_factory", "kvpress"]


@dataclass(frozen=True)
class AdaptiveHeads(HeadBudget):
    """A joint ranking of all heads decides how many rows each of them keeps; protected rows are kept in all of them.

    With H heads, B rows per head on average, W protected rows and floor f, let c_h be how many of the H (B - W) best
    unprotected rows of the layer belong to head h:

        "exact": W + (1 - f) c_h + f (B - W), whole numbers that sum to H B; what a short head cannot use goes to the
            others. The published formula, without its rounding error.
        "kvcache_factory": W + round_half_even((1 - f) c_h + int(f (B - W))), each head rounded on its own, as in
            KVCache-Factory and the authors' code: the sum may miss H B.
        "kvpress": the best max(1, int(f B)) rows of every head are safe (none for f = 0), the rest of the H B rows go
            to the best of the layer.

    normalize: weigh a head's scores by the share that its best B - W rows have of their sum before the joint ranking,
        as the authors' scripts do (for scores that are shares of attention).
    skip_layers: first layers that keep uniform heads.
    Ties are shared between the heads, so equal heads get equal rows; every head keeps at least one row.
    """

    floor: float = 0.2
    rule: Rule = "exact"
    normalize: bool = False
    skip_layers: int = 0

    def settled(self, evidence: Evidence, rows: Tensor) -> bool:
        if self.rule == "kvcache_factory":  # rounding drops rows even where the budget would just hold them
            return not bool((evidence.rows.lengths >= rows[:, None]).any())
        return super().settled(evidence, rows)

    def allocate(self, scores: Tensor, evidence: Evidence, rows: Tensor, protected: Tensor) -> Tensor:
        if evidence.layer_idx < self.skip_layers:
            return UniformHeads().allocate(scores, evidence, rows, protected)
        view = evidence.rows
        candidate = view.valid & ~protected
        ranked, present = _ranked(comparable(scores, view), candidate)
        fixed, free = protected.sum(dim=-1).cpu(), candidate.sum(dim=-1).cpu()
        if self.normalize:
            ranked = ranked * _top_share(ranked, present, (rows[:, None] - fixed).clamp(min=0))
        if self.rule == "kvpress":
            return self._safeguarded(ranked, present, rows, fixed, free)
        return self._mixed(ranked, present, rows, fixed, free)

    def _mixed(self, ranked: Tensor, present: Tensor, rows: Tensor, fixed: Tensor, free: Tensor) -> Tensor:
        heads = fixed.shape[1]
        spare = (rows[:, None] - fixed).clamp(min=0)  # [batch, heads] rows per head above its protected ones
        won = _won(ranked, present, spare.sum(dim=-1))
        if self.rule == "kvcache_factory":
            floors = (spare.double() * self.floor).to(torch.long)
            counts = (won * (1 - self.floor) + floors).round().to(torch.long)
            counts = torch.maximum(torch.minimum(counts, free), _least(fixed, free))
            return fixed + torch.where((spare > free).any(dim=1, keepdim=True), free, counts)
        wishes = (1 - self.floor) * won.double() + self.floor * spare.double()
        least = _least(fixed, free)
        shares = [
            shared_out(
                wishes[row].tolist(), least[row].tolist(), free[row].tolist(), int(rows[row]) * heads - int(held)
            )
            for row, held in enumerate(fixed.sum(dim=-1))
        ]
        return fixed + torch.tensor(shares)

    def _safeguarded(self, ranked: Tensor, present: Tensor, rows: Tensor, fixed: Tensor, free: Tensor) -> Tensor:
        safe = (rows.double() * self.floor).to(torch.long).clamp(min=1 if self.floor else 0)[:, None]
        safe = torch.minimum((safe - fixed).clamp(min=0), free)
        contested = torch.arange(ranked.shape[-1]) >= safe[..., None]
        total = rows * fixed.shape[1] - fixed.sum(dim=-1)
        counts = safe + _won(ranked, present & carried(contested, present.device), total - safe.sum(dim=-1))
        least = _least(fixed, free)
        shares = [
            shared_out(counts[row].tolist(), least[row].tolist(), free[row].tolist(), int(counts[row].sum()))
            for row in range(len(rows))
        ]
        return fixed + torch.tensor(shares)


def _least(fixed: Tensor, free: Tensor) -> Tensor:
    """One unprotected row where a head has rows but protects none."""
    return ((fixed == 0) & (free > 0)).to(torch.long)


def _ranked(scores: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of every head in descending order, candidates in front, and which of them are candidates."""
    order = ranking(scores, candidate).argsort(dim=-1, descending=True)
    return scores.gather(-1, order), candidate.gather(-1, order)


def _top_share(ranked: Tensor, present: Tensor, top: Tensor) -> Tensor:
    """Share of its candidates' sum that the first `top` [batch, heads] of every head hold: [batch, heads, 1]."""
    held = ranked.masked_fill(~present, 0.0)
    first = torch.arange(ranked.shape[-1], device=ranked.device) < carried(top, ranked.device)[..., None]
    total = held.sum(dim=-1, keepdim=True)
    share = (held * first).sum(dim=-1, keepdim=True) / total
    return torch.where(total != 0, share, 1.0)


def _won(ranked: Tensor, present: Tensor, total: Tensor) -> Tensor:
    """How many of the layer's best `total` [batch] candidates belong to each head: [batch, heads] on the CPU."""
    batch, heads, width = ranked.shape
    # Best rows of all heads first, then their second rows: ties go to the earlier, and so are shared between the heads.
    flat, there = (tensor.transpose(1, 2).reshape(batch, heads * width) for tensor in (ranked, present))
    order = ranking(flat, there).argsort(dim=-1, descending=True)
    taken = torch.arange(heads * width, device=order.device) < carried(total, order.device)[:, None]
    taken = taken & there.gather(-1, order)
    return (
        torch.zeros(batch, heads, dtype=torch.long, device=order.device)
        .scatter_add_(1, order % heads, taken.to(torch.long))
        .cpu()
    )
