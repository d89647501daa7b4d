"""The best of retrieval, whatever is read: free room is filled in the order of ranks."""

from dataclasses import dataclass

from kvfoundry.rag.policies.base import Policy, Seen
from kvfoundry.rag.policies.register import register


@register
@dataclass(frozen=True)
class RetrievalRank(Policy):
    """Baseline: where the best already fill the room, nothing happens."""

    name = "retrieval_rank"
    summary = "the order of retrieval, whatever attention says"

    def values(self, seen: Seen) -> list[float]:
        return [1.0 / (1 + rank) for rank in seen.ranks]
