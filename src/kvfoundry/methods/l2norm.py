"""L2Norm: rows whose keys have a small norm."""

from kvfoundry.checks import whole
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.scores.key_norm import KeyNorm


@register(
    paper="A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430",
    axes={"score": "minus the key norm", "budget": "uniform, first `skip_layers` layers whole", "schedule": "prompt"},
)
def l2norm(budget: Amount, skip_layers: int = 2) -> Piece:
    """Keep the rows with the smallest key norms; needs no query, so it also suits stored passages.

    score(j) = -||k_j||. The first `skip_layers` layers keep everything, as in the paper: the budget is that of the
    other layers. kvpress' Knorm is skip_layers=0.
    """
    checked_amount(budget)
    whole("skip_layers", skip_layers)
    return Piece(score=KeyNorm(), budget=UniformBudget(budget), skip_layers=skip_layers)
