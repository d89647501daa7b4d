"""H2O: heavy hitters, the rows with the most accumulated attention."""

from kvfoundry.checks import choice, whole
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.schedule import Schedule
from kvfoundry.selection.scores.accumulated_attention import AccumulatedAttention


@register(
    paper="H2O: Heavy-Hitter Oracle for Efficient Generative Inference, arXiv 2306.14048",
    axes={
        "score": "attention accumulated over all queries",
        "budget": "uniform",
        "protect": "newest `window` tokens",
        "schedule": "prompt, then every token",
    },
)
def h2o(budget: Amount, window: int = 32, normalize: bool = False, leaving: str = "keep") -> Piece:
    """Keep the rows with the largest column sums of attention, and the newest `window`, in prompt and decode.

    score(j) = group(sum over all queries i >= j of softmax(q_i k / sqrt(d))_j), accumulated in decode. The matrix of
    tokens by tokens is never built.

    normalize: divide by the number of queries that could see the row (kvpress' ObservedAttention, there window=0).
    leaving: the authors' code leaves the token that steps out of the recent window unread for one step before it
    competes as a heavy hitter; "skip" reproduces that, "keep" (the paper) reads it.
    """
    checked_amount(budget)
    whole("window", window)
    choice("leaving", leaving, ("keep", "skip"))
    return Piece(
        score=AccumulatedAttention(normalize),
        budget=UniformBudget(budget),
        protect=Protect(recent=window),
        schedule=Schedule(every=1),
        unread_distance=window if leaving == "skip" else None,
    )
