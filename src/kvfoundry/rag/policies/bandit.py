"""Candidates as the arms of a bandit: what was seen of each, and a bonus for those of which little was seen.

The rule is the upper confidence bound of UCB1 (Auer, Cesa-Bianchi, Fischer, 2002), scaled to the attention that
candidates get; the first guess of an arm that was never pulled is the estimate of its summary.
"""

import math
from dataclasses import dataclass

from kvfoundry.checks import number
from kvfoundry.rag.policies.base import By, Policy, Seen, check_measure
from kvfoundry.rag.policies.register import register


@register
@dataclass(frozen=True)
class Bandit(Policy):
    """by: the measure. bonus: of an arm never pulled, in means over all arms, times the root of the log of steps."""

    bonus: float = 0.5
    by: By = "focus"

    name = "bandit"
    summary = "attention spent, or estimated, and a bonus for what was little read (UCB1)"
    estimates = True

    def __post_init__(self) -> None:
        check_measure(self.name, self.by)
        number("bandit: bonus", self.bonus, least=0.0)

    def values(self, seen: Seen) -> list[float]:
        means = [
            estimated if spent is None else spent
            for spent, estimated in zip(seen.spent[self.by], seen.estimated[self.by], strict=True)
        ]
        scale = self.bonus * sum(means) / len(means)
        return [
            mean + scale * math.sqrt(math.log(1 + seen.step) / (1 + steps))
            for mean, steps in zip(means, seen.steps, strict=True)
        ]
