"""Attention that each candidate would get from the newest queries, by the summaries of their keys."""

from dataclasses import dataclass

from kvfoundry.rag.policies.base import Policy, Seen
from kvfoundry.rag.policies.register import register


@register
@dataclass(frozen=True)
class Summary(Policy):
    """Resident and absent candidates are held against the same measure, though more is known of the resident ones."""

    name = "summary"
    summary = "queries of now against a summary of every candidate's keys"
    estimates = True

    def values(self, seen: Seen) -> list[float]:
        return list(seen.estimated)
