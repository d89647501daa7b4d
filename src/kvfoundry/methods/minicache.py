"""MiniCache: the rows of two neighbouring layers share one direction."""

from kvfoundry.checks import number
from kvfoundry.codecs.minicache import LayerPairs
from kvfoundry.method import Piece
from kvfoundry.registry import register


@register(
    paper="MiniCache: KV Cache Compression in Depth Dimension for Large Language Models, arXiv 2405.14366",
    axes={"pairs": "rows of layers 2i and 2i+1 merged by direction, from a share of the depth on; no row is dropped"},
    evicts=False,
)
def minicache(start: float = 0.5, t: float = 0.6, retention: float = 0.05) -> Piece:
    """Store one direction for the rows of two neighbouring layers, and for each layer how long its rows are.

    direction ~ sin((1 - t) W) / sin(W) u_earlier + sin(t W) / sin(W) u_later, W the angle between the unit vectors u of
    a row in the two layers, per head and token, keys and values apart; a row is read as its direction times its own
    length. The layers 2i and 2i + 1 are merged where 2i is at least `start` times the number of layers. The `retention`
    share of the prompt's rows with the largest angles (rounded up, per head) stays exact in both layers; of later rows,
    those whose angle is larger than any that was merged there, as long as the share holds. Every row is read exactly in
    the call in which it is new.

    All this rests on neighbouring layers being alike: `cache.notes` says so when a prompt shows that they are not.
    Both layers of a pair must be of one kind and shape: families that alternate kinds of layers are refused by name.
    Pairs of window layers stay as they are.
    """
    number("start", start, least=0, most=1)
    number("t", t, least=0, most=1)
    number("retention", retention, least=0, most=1)
    return Piece(pairs=LayerPairs(float(start), float(t), float(retention)))
