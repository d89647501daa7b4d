"""Attention that each candidate really got while it was here."""

from dataclasses import dataclass

from kvfoundry.rag.policies.base import By, Policy, Seen, check_measure
from kvfoundry.rag.policies.register import register


@register
@dataclass(frozen=True)
class AttentionMass(Policy):
    """Of a candidate that was never here nothing is known: it counts as much as the mean of the others, by rank.

    by: the measure. So passages that get less than the mean give way to unknown ones, the best rank first, until each
    has been read.
    """

    by: By = "focus"

    name = "attention_mass"
    summary = "attention spent so far; what was never read counts as the mean"

    def __post_init__(self) -> None:
        check_measure(self.name, self.by)

    def values(self, seen: Seen) -> list[float]:
        known = [spent for spent in seen.spent[self.by] if spent is not None]
        mean = sum(known) / len(known) if known else 1.0
        # a hair less for every rank, so that the order of ranks decides between unknown ones
        return [
            mean * (1 - 1e-3 * rank) if spent is None else spent
            for rank, spent in zip(seen.ranks, seen.spent[self.by], strict=True)
        ]
