"""TOVA: token omission via attention, one ranking per layer from the newest query."""

from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.schedule import Schedule
from kvfoundry.selection.scores.last_query import LastQueryAttention


@register(
    paper="Transformers are Multi-State RNNs, arXiv 2401.06104",
    axes={
        "score": "attention of the newest query, mean over heads",
        "budget": "uniform",
        "protect": "the newest token",
        "schedule": "prompt, then every token",
    },
)
def tova(budget: Amount) -> Piece:
    """Drop, after the prompt and at every step, the rows that the newest query attends to least.

    score(j) = mean over all query heads of softmax(q_last k / sqrt(d))_j: the same kept set in every head of a layer.
    """
    checked_amount(budget)
    return Piece(
        score=LastQueryAttention(),
        budget=UniformBudget(budget),
        protect=Protect(recent=1),
        schedule=Schedule(every=1),
    )
