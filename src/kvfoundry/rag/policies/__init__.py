"""What a passage is worth while an answer is decoded: one file per policy."""

from kvfoundry.rag.policies.base import Policy, Seen
from kvfoundry.rag.policies.register import policies, policy

__all__ = ["Policy", "Seen", "policies", "policy"]
