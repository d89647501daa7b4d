"""KeyDiff: rows whose keys point away from the others."""

from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.scores.key_difference import KeyDifference


@register(
    paper="KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv 2504.15364",
    axes={"score": "minus the cosine to the mean key direction", "budget": "uniform", "schedule": "prompt"},
)
def keydiff(budget: Amount) -> Piece:
    """Keep the rows whose keys differ most from the mean key direction; needs no query and no attention weights.

    score(j) = -cos(k_j, mean over stored rows i of k_i / ||k_i||), keys after RoPE. The paper evicts block by block
    (its setting for long prompts is prefill_chunk, or the `blocks` piece): the mean is then that of the rows at hand.
    """
    checked_amount(budget)
    return Piece(score=KeyDifference(), budget=UniformBudget(budget))
