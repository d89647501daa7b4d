"""Plain group-wise codes: int8, int4 and int2."""

from kvfoundry.checks import choice, whole
from kvfoundry.codecs.base import Codec, KVCodec
from kvfoundry.codecs.grouped import MODES
from kvfoundry.codecs.groups import PerChannel, PerToken
from kvfoundry.method import Piece
from kvfoundry.registry import register

_AXES = {"codec": "whole numbers per group, one scale (and minimum) each"}


def _coded(bits: int, group: int, mode: str, keys: str, values: str, residual: int) -> Piece:
    whole("group", group, least=2)
    choice("mode", mode, MODES)
    whole("residual", residual)

    def side(name: str, along: str) -> Codec:
        choice(name, along, ("channels", "tokens"))
        if along == "tokens":
            return PerChannel(bits, group, mode, residual)  # type: ignore[arg-type]
        return PerToken(bits, group, mode, residual)  # type: ignore[arg-type]

    return Piece(codec=KVCodec(side("keys", keys), side("values", values)))


@register(paper="round to nearest, the plain baseline", axes=_AXES, evicts=False)
def int8(
    group: int = 32, mode: str = "asymmetric", keys: str = "channels", values: str = "channels", residual: int = 0
) -> Piece:
    """Store rows in 8 bits: groups of `group` numbers with a scale each.

    x' = code scale + min, scale = (max - min) / 255. mode: "asymmetric", "symmetric" (codes -127 to 127),
    "symmetric_full" (-128 to 127) or "zero_point" (a whole zero point in place of the minimum).
    keys, values: "channels" groups neighbouring channels of one token, "tokens" neighbouring tokens of one channel.
    residual: newest rows that stay in full precision; up to 32 (or one group) more wait to be written together.
    """
    return _coded(8, group, mode, keys, values, residual)


@register(paper="round to nearest, the plain baseline", axes=_AXES, evicts=False)
def int4(
    group: int = 32, mode: str = "asymmetric", keys: str = "channels", values: str = "channels", residual: int = 0
) -> Piece:
    """Store rows in 4 bits: groups of `group` numbers with a scale each.

    As int8, with 15 steps from the smallest to the largest number of a group.
    """
    return _coded(4, group, mode, keys, values, residual)


@register(paper="round to nearest, the plain baseline", axes=_AXES, evicts=False)
def int2(
    group: int = 32, mode: str = "asymmetric", keys: str = "channels", values: str = "channels", residual: int = 0
) -> Piece:
    """Store rows in 2 bits: groups of `group` numbers with a scale each.

    As int8, with 3 steps from the smallest to the largest number of a group.
    """
    return _coded(2, group, mode, keys, values, residual)
