"""AdaKV: SnapKV's rows, shared unevenly among the heads of a layer."""

from kvfoundry.checks import choice, flag, number, whole
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection import adaptive_heads as axis
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.pooling import checked_kernel
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.scores.window_attention import WindowAttention


@register(
    paper="Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation, arXiv 2407.11550",
    axes={
        "score": "attention of the last `window` queries, pooled",
        "budget": "uniform",
        "heads": "adaptive, by a joint ranking",
        "protect": "the window",
        "schedule": "prompt",
    },
)
def adakv(
    budget: Amount,
    window: int = 32,
    kernel: int = 5,
    pooling: str = "avg",
    floor: float = 0.2,
    normalize: bool = False,
    rule: str = "exact",
) -> Piece:
    """Keep the rows that the last `window` queries attend to; heads with more of the layer's best rows keep more.

    The score of snapkv. Of the rows above the window, a share `floor` is spread evenly over the heads, the rest
    follows the joint ranking of all heads: with H heads and c_h of the H (budget - window) best rows in head h, head h
    keeps window + (1 - floor) c_h + floor (budget - window).

    normalize: weigh each head by the concentration of its scores before the joint ranking (the authors' scripts; not in
    the paper). rule: "exact" makes the heads sum to the budget; "kvcache_factory" (also the authors' code) rounds each
    head by itself and may miss it; "kvpress" makes `floor` a share of rows that are safe in every head. See
    `AdaptiveHeads`. With the pyramid of the paper's experiments: pyramidkv(...)+adaptive_heads.
    """
    checked_amount(budget)
    checked_kernel(window, kernel)
    choice("pooling", pooling, ("avg", "max"))
    return Piece(
        score=WindowAttention(window, kernel, pooling),  # type: ignore[arg-type]
        budget=UniformBudget(budget),
        heads=_heads(floor, normalize, rule),
        protect=Protect(recent=window),
    )


@register(paper="axis, arXiv 2407.11550", axes={"heads": "adaptive, by a joint ranking"}, kind="piece")
def adaptive_heads(floor: float = 0.2, normalize: bool = False, rule: str = "exact", skip_layers: int = 0) -> Piece:
    """Share the rows of a layer among its heads by their scores, over any method: the head budgets of adakv.

    skip_layers: first layers whose heads all keep the same.
    """
    return Piece(heads=_heads(floor, normalize, rule, skip_layers))


def _heads(floor: float, normalize: bool, rule: str, skip_layers: int = 0) -> axis.AdaptiveHeads:
    number("floor", floor, least=0, most=1)
    flag("normalize", normalize)
    choice("rule", rule, ("exact", "kvcache_factory", "kvpress"))
    whole("skip_layers", skip_layers)
    return axis.AdaptiveHeads(floor, rule, normalize, skip_layers)  # type: ignore[arg-type]
