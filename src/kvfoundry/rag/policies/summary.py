"""Attention that each candidate would get from the newest queries, by the summaries of their keys."""

from dataclasses import dataclass

from kvfoundry.rag.policies.base import By, Policy, Seen, check_measure
from kvfoundry.rag.policies.register import register


@register
@dataclass(frozen=True)
class Summary(Policy):
    """by: the measure. Resident and absent candidates alike are judged by summaries, though of some more is known."""

    by: By = "focus"

    name = "summary"
    summary = "queries of now against a summary of every candidate's keys"
    estimates = True

    def __post_init__(self) -> None:
        check_measure(self.name, self.by)

    def values(self, seen: Seen) -> list[float]:
        return list(seen.estimated[self.by])
