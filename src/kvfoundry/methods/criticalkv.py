"""CriticalKV: SnapKV's ranking, completed by how much a value can change the layer's output."""

from dataclasses import replace

from kvfoundry.method import Piece
from kvfoundry.methods.critical import refinement
from kvfoundry.methods.snapkv import snapkv
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount


@register(
    paper="Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective, arXiv 2502.03805",
    axes={
        "score": "attention of the last `window` queries, pooled",
        "refine": "`first` of the budget by score, the rest by score times projected value norm",
        "budget": "uniform",
        "protect": "the window",
        "schedule": "prompt",
    },
)
def criticalkv(
    budget: Amount,
    window: int = 32,
    kernel: int = 5,
    pooling: str = "avg",
    first: float = 0.5,
    epsilon: float = 1e-4,
) -> Piece:
    """Keep rows by attention first, then by attention times the L1 norm of W_o v: a bound on the output's change.

    Stage 1 keeps the best int(first * budget) rows of SnapKV's score (window included); stage 2 fills the budget by
    (score(j) + epsilon) * mean over the group's query heads h of ||W_o[h] v_j||_1, W_o[h] the columns of the output
    projection that read head h. `critical()` does the same over any other score. Needs the model's weights.
    """
    return replace(snapkv(budget, window, kernel, pooling), refine=refinement(first, epsilon))
