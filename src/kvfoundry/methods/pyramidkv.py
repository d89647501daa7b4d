"""PyramidKV: SnapKV's rows, more of them in the first layers and fewer in the last."""

from kvfoundry.checks import choice
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, checked_amount
from kvfoundry.selection.pooling import checked_kernel
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.pyramid import PyramidBudget, PyramidLayers, checked_pyramid
from kvfoundry.selection.scores.window_attention import WindowAttention


@register(
    paper="PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, arXiv 2406.02069",
    axes={
        "score": "attention of the last `window` queries, pooled",
        "budget": "a pyramid over the layers",
        "protect": "the window",
        "schedule": "prompt",
    },
)
def pyramidkv(
    budget: Amount, window: int = 32, kernel: int = 5, pooling: str = "avg", beta: float = 20, rule: str = "exact"
) -> Piece:
    """Keep the rows that the last `window` queries attend to, on a budget that falls from layer to layer.

    The score of snapkv. Above the window, the last layer keeps (budget - window) / beta rows, the first
    2 (budget - window) minus that, those between a straight line; where the first layer would keep more rows than the
    prompt has, the line is flattened around the same mean. `beta` is the steepness, 1 is snapkv.

    rule: "exact" makes the layers sum to the budget. The authors' code (KVCache-Factory) floors the step, which keeps
    slightly more, and goes flat when the prompt is short: "kvcache_factory" reproduces it, "adakv" its variant in
    FFY0/AdaKV, "kvpress" NVIDIA's. See `PyramidBudget`.
    """
    checked_amount(budget)
    checked_kernel(window, kernel)
    choice("pooling", pooling, ("avg", "max"))
    checked_pyramid(beta, rule)
    return Piece(
        score=WindowAttention(window, kernel, pooling),  # type: ignore[arg-type]
        budget=PyramidBudget(budget, window, beta, rule),  # type: ignore[arg-type]
        protect=Protect(recent=window),
    )


@register(paper="axis, arXiv 2406.02069", axes={"budget": "a pyramid over the layers"}, kind="piece")
def pyramid_layers(beta: float = 20) -> Piece:
    """The pyramid of pyramidkv over the budget of any method: more rows in the first layers, fewer in the last."""
    checked_pyramid(beta, "exact")
    return Piece(layers=PyramidLayers(beta))
