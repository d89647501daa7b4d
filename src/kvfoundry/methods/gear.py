"""GEAR: a quantized base, what it misses as a low-rank matrix, and the largest numbers exactly."""

from kvfoundry.checks import number, whole
from kvfoundry.codecs import KVCodec
from kvfoundry.codecs.gear import GearKeys, GearValues
from kvfoundry.errors import SpecError
from kvfoundry.method import Piece
from kvfoundry.registry import register


@register(
    paper="GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference, arXiv 2403.05527",
    axes={"codec": "groups of 2 to 8 bits, low-rank residual and sparse outliers, per block of tokens"},
    evicts=False,
)
def gear(
    bits: int = 4, rank: int = 4, outlier_ratio: float = 0.02, group: int = 64, block: int = 64, loops: int = 3
) -> Piece:
    """Store rows in blocks of `block` tokens: codes of `bits`, a residual of rank `rank`, and exact outliers.

        x' = Quant(x without outliers) + outliers + Q P^T

    Keys are quantized per channel over the tokens of a block, values per token over `group` channels (all of a head
    where `group` does not divide its size). Of every such row the largest and smallest numbers, together the share
    `outlier_ratio` but at least one of either, are kept exactly. Q P^T approximates, per head and block, what is still
    missing: power iteration with `loops` rounds from a fixed start, so results do not depend on how tokens arrive. The
    newest tokens, fewer than a block, wait in full precision, in the prompt and in decode alike.
    rank=0 leaves the residual out, outlier_ratio=0 the outliers (GEAR-L in the paper).
    """
    if bits not in (2, 3, 4, 8) or isinstance(bits, bool):
        raise SpecError(f"gear: bits must be 2, 3, 4 or 8, got {bits!r}.")
    whole("rank", rank)
    number("outlier_ratio", outlier_ratio, least=0, most=0.5)
    whole("group", group, least=2)
    whole("block", block, least=2)
    whole("loops", loops, least=1)
    if block > 256:
        raise SpecError(f"gear: a block has at most 256 tokens, so that a place in it takes one byte; got {block}.")
    shared = (bits, rank, float(outlier_ratio), block, loops)
    return Piece(codec=KVCodec(GearKeys(*shared), GearValues(*shared, group=group)))
