"""HeadKV: rows to the heads that retrieve, as measured once for the model."""

from kvfoundry.checks import choice, number
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, checked_amount
from kvfoundry.selection.head_table import HeadTable, TableBudget, TableHeads
from kvfoundry.selection.pooling import checked_kernel
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.scores.window_attention import WindowAttention


@register(
    paper="Not All Heads Matter: A Head-Level KV Cache Compression Method, arXiv 2410.19258",
    axes={
        "score": "attention of the last `window` queries, pooled",
        "budget": "by head importance, over all layers",
        "heads": "by head importance",
        "protect": "the window",
        "schedule": "prompt",
    },
)
def headkv(
    budget: Amount,
    table: str | tuple[tuple[float, ...], ...],
    beta: float = 1.01,
    window: int = 32,
    kernel: int = 5,
    pooling: str = "avg",
    temperature: float = 1.0,
    rule: str = "exact",
) -> Piece:
    """Keep the rows that the last `window` queries attend to; heads that retrieve or reason more keep more.

    The score of snapkv. table: importance of every head of this model: a JSON file in the published form
    {"layer-head": score}, which `kvfoundry analyze heads` writes, or ((score, ...) per layer, ...). With b = budget -
    window and p_h the head's share of all scores of the table, head h keeps
    window + p_h (b // beta) (all heads) + b - b // beta rows: each head gives 1 / beta of its rows into one pool for
    the whole model. temperature: exponent on p before it is normalized again.

    rule: "exact" never exceeds the budget; "authors" rounds each head by itself (FYYFU/HeadKV); "kvcache_factory"
    forgets to take the window off, so a head keeps about `window` rows more. See `TableHeads`.
    """
    checked_amount(budget)
    checked_kernel(window, kernel)
    choice("pooling", pooling, ("avg", "max"))
    number("beta", beta, least=1)
    number("temperature", temperature, least=0)
    choice("rule", rule, ("exact", "authors", "kvcache_factory"))
    rows = TableBudget(budget, HeadTable.read(table), window, beta, temperature, rule)  # type: ignore[arg-type]
    return Piece(
        score=WindowAttention(window, kernel, pooling),  # type: ignore[arg-type]
        budget=rows,
        heads=TableHeads(rows),
        protect=Protect(recent=window),
    )
