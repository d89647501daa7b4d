"""StreamingLLM: attention sinks and a sliding window of recent tokens."""

from kvfoundry.checks import choice, whole
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.schedule import Schedule
from kvfoundry.selection.scores.recency import Recency


@register(
    paper="Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453",
    axes={
        "score": "token index",
        "budget": "uniform",
        "protect": "first `sinks` tokens",
        "schedule": "prompt, then every token",
    },
)
def streamingllm(budget: Amount, sinks: int = 4, positions: str = "original") -> Piece:
    """Keep the first `sinks` tokens and the newest `budget - sinks`, in prompt and decode.

    keep(i) = i < sinks or i >= seen - (budget - sinks), the same for every head.

    positions: "original" leaves every key at the position it was computed for, as KVCache-Factory and kvpress do.
    "slot" is the paper's form: attention sees consecutive positions, so the sinks move along in front of the window and
    no distance ever exceeds the budget; a model can then stream past its trained length.
    """
    checked_amount(budget)
    whole("sinks", sinks)
    choice("positions", positions, ("original", "slot"))
    return Piece(
        score=Recency(),
        budget=UniformBudget(budget),
        protect=Protect(sinks=sinks),
        schedule=Schedule(every=1),
        slot_positions=positions == "slot" or None,
    )
