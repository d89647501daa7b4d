"""LOOK-M's pivotal merge: dropped rows go half into the kept row nearest to them."""

from kvfoundry.merging.pivot import PivotMerge
from kvfoundry.method import Piece
from kvfoundry.registry import register


@register(
    paper="LOOK-M: Look-Once Optimization in KV Cache for Efficient Multimodal Long-Context Inference, "
    "arXiv 2406.18139",
    axes={"dispose": "merge into the kept row with the most similar key"},
    kind="piece",
)
def pivot_merge() -> Piece:
    """Fold keys and values of every dropped row into the kept row with the most similar key.

    k' = (k + sum over the n dropped rows that chose it of (k_dropped + k) / 2) / (1 + n), the same for values; the
    target is the one with the largest cosine of keys as attention sees them, protected rows included. LOOK-M also
    keeps the first 4 tokens: add protect(sinks=4). KVCache-Factory's merge="pivot" is this form.
    """
    return Piece(dispose=PivotMerge())
