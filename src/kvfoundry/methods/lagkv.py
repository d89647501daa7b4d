"""LagKV: rows that stand out against the range of the tokens after them."""

from kvfoundry.checks import choice, whole
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.scores.lag_relative import LagRelative


@register(
    paper="LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important, arXiv 2504.04704",
    axes={
        "score": "channel deviation relative to the next `lag` tokens",
        "budget": "uniform",
        "protect": "first `sinks` tokens",
        "schedule": "prompt",
    },
)
def lagkv(budget: Amount, lag: int = 128, sinks: int = 4, ranking: str = "partition") -> Piece:
    """Keep rows whose keys and values vary most over their channels, measured in the range of the next partition.

    Rows behind the sinks are cut into partitions of `lag`. With the minimum and maximum over the tokens of partition
    p + 1, per channel: x'(j) = (x_j - min) / (max - min) for j in p; score(j) = mean over keys and values of
    softmax over j in p of std over channels of x'(j). The last full partition and what follows come first of all,
    newest before older. No attention weights and no queries are needed.

    ranking: "partition" (the paper) keeps the same share of every partition; "overall" compares partitions with each
    other (kvpress' cross_scoring).
    """
    checked_amount(budget)
    whole("lag", lag, least=2)
    whole("sinks", sinks)
    choice("ranking", ranking, ("partition", "overall"))
    return Piece(
        score=LagRelative(sinks, lag, ranking == "overall"),
        budget=UniformBudget(budget),
        protect=Protect(sinks=sinks),
    )
