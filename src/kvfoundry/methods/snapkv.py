"""SnapKV: the prompt rows that the end of the prompt attends to."""

from kvfoundry.checks import choice
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.pooling import checked_kernel
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.scores.window_attention import WindowAttention


@register(
    paper="SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469",
    axes={
        "score": "attention of the last `window` queries, pooled",
        "budget": "uniform",
        "protect": "the window",
        "schedule": "prompt",
    },
)
def snapkv(budget: Amount, window: int = 32, kernel: int = 5, pooling: str = "avg") -> Piece:
    """Keep the rows that the last `window` queries of the prompt attend to, and the window itself.

    score(j) = pool_kernel(group(mean over the window's queries i of softmax(q_i k / sqrt(d))_j)), ranked per KV head.
    pooling: "avg" (the paper's code) or "max" (KVCache-Factory's scripts), over `kernel` neighbours, `kernel` odd.
    """
    checked_amount(budget)
    checked_kernel(window, kernel)
    choice("pooling", pooling, ("avg", "max"))
    return Piece(
        score=WindowAttention(window, kernel, pooling),  # type: ignore[arg-type]
        budget=UniformBudget(budget),
        protect=Protect(recent=window),
    )
