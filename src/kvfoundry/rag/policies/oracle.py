"""What attention will be spent in the coming steps when all candidates are here: an upper bound, known afterwards."""

from dataclasses import dataclass

from kvfoundry.rag.policies.base import Policy, Seen
from kvfoundry.rag.policies.register import register


@register
@dataclass(frozen=True)
class Oracle(Policy):
    """Needs an answer over all candidates first; for measuring only."""

    name = "oracle"
    summary = "attention of the coming steps, from an answer over all candidates (upper bound)"
    foresees = True

    def values(self, seen: Seen) -> list[float]:
        assert seen.future is not None, "the oracle needs an answer over all candidates first"
        return list(seen.future)
