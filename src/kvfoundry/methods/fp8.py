"""8-bit floating point rows."""

from kvfoundry.checks import whole
from kvfoundry.codecs.base import KVCodec
from kvfoundry.codecs.fp8 import Float8
from kvfoundry.method import Piece
from kvfoundry.registry import register


@register(
    paper="FP8 Formats for Deep Learning, arXiv 2209.05433",
    axes={"codec": "e4m3, one scale per token"},
    evicts=False,
)
def fp8(group: int | None = None, residual: int = 0) -> Piece:
    """Store rows as 8-bit floats (e4m3), scaled so that nothing overflows.

    x' = code scale, scale = max|x| / 448 over `group` neighbouring channels of a token (None: all of its head).
    """
    if group is not None:
        whole("group", group, least=2)
    whole("residual", residual)
    return Piece(codec=KVCodec(Float8(group, residual), Float8(group, residual)))
