"""Attention that a row can expect from future queries, taken as Gaussian (Expected Attention)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfoundry.devices import carried
from kvfoundry.errors import CacheStateError
from kvfoundry.rope import Rope
from kvfoundry.selection.evidence import Evidence, Summary
from kvfoundry.selection.scores.base import Score

# Future positions to rotate at once: bounds the transient [batch, dim, positions, dim].
_POSITIONS = 64


@dataclass(frozen=True)
class ExpectedAttention(Score):
    """softmax over rows of mu.k scaling + k'Ck scaling^2 / 2, times the value norm.

    mu and C: mean and covariance of the queries before RoPE (tokens from `sinks` on), turned by the mean rotation of
    the next `future` positions. They are accumulated over calls, so a prompt may come in pieces.
    """

    future: int = 512
    sinks: int = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0

    @property
    def accumulates(self) -> bool:
        return True

    @property
    def needs_rope(self) -> bool:
        return True

    def summary(self, evidence: Evidence, earlier: Summary) -> Summary:
        rope = _rope(evidence)
        positions = evidence.query_positions
        # The queries of this call were rotated with the frequencies of its largest position.
        raw = rope.unrotate(evidence.query, positions[:, None], length=int(positions.max()) + 1).float()
        counted = (positions >= self.sinks)[:, None, :, None].to(raw.dtype)
        count = counted.sum(dim=2)  # [batch, 1, 1]
        mean = (raw * counted).sum(dim=2) / count.clamp(min=1)
        centred = (raw - mean[:, :, None]) * counted
        found = {"count": count, "mean": mean}
        if self.covariance:
            found["scatter"] = torch.einsum("bhqi,bhqj->bhij", centred, centred)
        return _pooled(earlier, found) if earlier else found

    def __call__(self, evidence: Evidence) -> Tensor:
        rows, summary = evidence.rows, evidence.summary
        turn = self._mean_rotation(evidence)  # [batch, dim, dim], row i = where the basis vector i goes
        mean = torch.einsum("bhi,bij->bhj", summary["mean"], turn)
        batch, query_heads, dim = mean.shape
        heads, groups = rows.keys.shape[1], evidence.groups
        keys, scaling = rows.keys.float(), evidence.reading.scaling
        logits = torch.einsum("bhgd,bhnd->bhgn", mean.view(batch, heads, groups, dim), keys) * scaling
        if self.covariance:
            spread = summary["scatter"] / summary["count"].clamp(min=1)[..., None]
            spread = torch.einsum("bik,bhij,bjl->bhkl", turn, spread, turn).view(batch, heads, groups, dim, dim)
            for group in range(groups):  # one [rows, dim] product at a time
                along = (keys @ spread[:, :, group] * keys).sum(dim=-1)
                logits[:, :, group] += along * (scaling**2 / 2)
        ranked = (rows.head_positions >= self.sinks)[:, :, None]
        weights = logits.masked_fill(~ranked, torch.finfo(logits.dtype).min).softmax(dim=-1) * ranked
        scores = evidence.reduced(weights.view(batch, query_heads, -1))
        if self.value_norm:
            return (scores + self.epsilon) * rows.values.float().norm(dim=-1)
        return scores

    def _mean_rotation(self, evidence: Evidence) -> Tensor:
        rope, device = _rope(evidence), evidence.rows.keys.device
        dim, batch = evidence.query.shape[-1], evidence.seen.shape[0]
        basis = torch.eye(dim, device=device)[None, :, None].expand(batch, -1, -1, -1)
        total = torch.zeros(batch, dim, dim, device=device)
        start = carried(evidence.seen, device)[:, None, None]
        for first in range(0, self.future, _POSITIONS):
            offset = torch.arange(first, min(first + _POSITIONS, self.future), device=device)
            turned = rope.rotate(basis.expand(-1, -1, len(offset), -1), start + offset)
            total += turned.sum(dim=2)
        return total / self.future


def _rope(evidence: Evidence) -> Rope:
    if evidence.rope is None:
        raise CacheStateError("expected attention needs the model's RoPE; use it through KVCache(model).")
    return evidence.rope


def _pooled(earlier: Summary, found: Summary) -> Summary:
    """Mean and scatter of two samples together; no difference of large sums, so nothing is lost in float32."""
    count = earlier["count"] + found["count"]
    apart = found["mean"] - earlier["mean"]
    share = found["count"] / count.clamp(min=1)
    both = {"count": count, "mean": earlier["mean"] + apart * share}
    if "scatter" in found:
        between = torch.einsum("bhi,bhj->bhij", apart, apart) * (earlier["count"] * share)[..., None]
        both["scatter"] = earlier["scatter"] + found["scatter"] + between
    return both
