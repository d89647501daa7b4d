"""CurDKV: rows with large leverage, approximated by squared norms."""

from kvfoundry.checks import choice, whole
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.scores.squared_norms import SquaredNorms


@register(
    paper="Value-Guided KV Compression for LLMs via Approximated CUR Decomposition, arXiv 2509.15038",
    axes={
        "score": "squared norms of key and value, relative to their neighbourhood",
        "budget": "uniform",
        "protect": "first `sinks` tokens",
        "schedule": "prompt",
    },
)
def cur(
    budget: Amount, sinks: int = 4, leverage: str = "kv_product", block: int | None = 16, seed: int | None = None
) -> Piece:
    """Keep the rows whose keys and values carry most of the squared norm around them; no attention is needed.

    l_k(j) = ||k_j||^2 / sum over j's block of ||k||^2, l_v likewise; score(j) = l_k l_v, normalised over rows.

    leverage: "kv_product", "kv_avg", "key" or "value". block: rows per neighbourhood, None for the whole sequence.
    seed: project keys and values to 20 random directions first (the paper's sketch), None for the exact norms.
    """
    checked_amount(budget)
    whole("sinks", sinks)
    choice("leverage", leverage, ("kv_product", "kv_avg", "key", "value"))
    for name, value in (("block", block), ("seed", seed)):
        if value is not None:
            whole(name, value, least=1 if name == "block" else 0)
    return Piece(
        score=SquaredNorms(leverage, block, seed),  # type: ignore[arg-type]
        budget=UniformBudget(budget),
        protect=Protect(sinks=sinks),
    )
