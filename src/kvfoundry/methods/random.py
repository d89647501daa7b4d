"""Random eviction: the baseline that a score must beat."""

from kvfoundry.checks import whole
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.scores.uniform_random import UniformRandom


@register(
    paper="baseline",
    axes={"score": "uniform random by seed, layer, head and token index", "budget": "uniform", "schedule": "prompt"},
)
def random(budget: Amount, seed: int = 0) -> Piece:
    """Keep random rows; the draw of a token depends on seed, layer, head and its index, never on the batch."""
    checked_amount(budget)
    whole("seed", seed)
    return Piece(score=UniformRandom(seed), budget=UniformBudget(budget))
