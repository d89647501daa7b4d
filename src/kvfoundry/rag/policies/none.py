"""Nothing is brought: the answer is made of what was resident at its beginning."""

from dataclasses import dataclass

from kvfoundry.rag.policies.base import Policy, Seen
from kvfoundry.rag.policies.register import register


@register
@dataclass(frozen=True)
class Nothing(Policy):
    """Baseline."""

    name = "none"
    summary = "brings nothing: what is resident at the beginning stays"

    def values(self, seen: Seen) -> list[float]:
        return [0.0] * len(seen.ranks)
