"""KIVI: keys in low bits per channel, values per token, the newest rows whole."""

from kvfoundry.checks import choice, whole
from kvfoundry.codecs.base import KVCodec
from kvfoundry.codecs.groups import PerChannel, PerToken
from kvfoundry.codecs.packing import WIDTHS
from kvfoundry.errors import SpecError
from kvfoundry.method import Piece
from kvfoundry.registry import register


@register(
    paper="KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache, arXiv 2402.02750",
    axes={"codec": "keys per channel over `group` tokens, values per token over `group` channels, newest rows whole"},
    evicts=False,
)
def kivi(bits: int = 2, group: int = 32, residual: int = 128, flow: str = "groups") -> Piece:
    """Store keys per channel and values per token in `bits` bits (1, 2, 4 or 8), the newest rows in full precision.

    scale = (max - min) / (2^bits - 1), code = round((x - min) / scale), x' = code scale + min; for keys over `group`
    consecutive tokens of one channel, for values over `group` consecutive channels of one token.

    flow="groups": `residual` rows stay whole, and a group more is encoded as soon as it is full: never more than
    residual + group rows wait. flow="paper", of the authors' code: keys wait until `residual` of them can be encoded at
    once, values are encoded one by one and exactly `residual` wait; `residual` is a multiple of `group` there.
    """
    if bits not in WIDTHS:
        raise SpecError(f"kivi: bits must be one of {', '.join(map(str, WIDTHS))}, got {bits!r}.")
    whole("group", group, least=2)
    whole("residual", residual)
    choice("flow", flow, ("groups", "paper"))
    if flow == "groups":
        return Piece(
            codec=KVCodec(
                PerChannel(bits, group, waiting=residual), PerToken(bits, group, waiting=residual, together=group)
            )
        )
    if residual == 0 or residual % group:
        raise SpecError(f"kivi: flow='paper' needs a residual that is a multiple of the group ({group}).")
    return Piece(
        codec=KVCodec(PerChannel(bits, group, together=residual), PerToken(bits, group, waiting=residual, together=1))
    )
