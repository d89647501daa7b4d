"""Leverage scores: rows whose keys span directions that few others do."""

from kvfoundry.checks import whole
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.scores.leverage import Leverage


@register(
    paper="Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores, "
    "arXiv 2507.08143",
    axes={"score": "sketched leverage of the key before RoPE", "budget": "uniform", "schedule": "prompt"},
)
def leverage(budget: Amount, sketch: int = 48, seed: int = 0) -> Piece:
    """Keep the rows whose keys, before RoPE, are hardest to express by the other keys; needs no queries.

    X = (K - mean K) Phi / sqrt(sketch) with Phi [head_dim, sketch] normal; score(j) = x_j (X'X + 0.01 I)^-1 x_j'.
    The ranking of kvpress' LeverageScore, which normalises over the whole layer tensor, batch included, without an
    effect on the order inside a head. Phi depends on seed, layer and head only. Needs a model with RoPE.
    """
    checked_amount(budget)
    whole("sketch", sketch, least=1)
    whole("seed", seed)
    return Piece(score=Leverage(sketch, seed), budget=UniformBudget(budget))
