"""One prompt read once by many methods, and their answers decoded in common batches."""

from kvfoundry.together.answers import generate_together
from kvfoundry.together.prompt import SharedPrompt

__all__ = ["SharedPrompt", "generate_together"]
