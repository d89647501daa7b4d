"""Which codes the kernels of `coded_decode` read, and how a codec's parts become what they are given."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.codecs.base import Codec, KVCodec
from kvfoundry.codecs.fp8 import Float8
from kvfoundry.codecs.groups import PerChannel, PerToken
from kvfoundry.kernels.coded_decode import Codes
from kvfoundry.layouts.coded import CodedRows

_KINDS = (PerChannel, PerToken, Float8)


def codec_refusal(codec: object) -> str | None:
    """Why codes of this kind cannot be read by a kernel; None where they can."""
    if not isinstance(codec, KVCodec) or not isinstance(codec.keys, _KINDS) or not isinstance(codec.values, _KINDS):
        return "stores rows in a form that no kernel of the engine reads"
    if (codec.keys.residual, codec.keys.stride) != (codec.values.residual, codec.values.stride):
        return "writes keys and values down at different times"
    for side in (codec.keys, codec.values):
        group = side.group or 1
        if group & (group - 1):
            return f"has groups of {group}, which is no power of two"
        if not isinstance(side, Float8) and side.bits not in (1, 2, 4, 8):
            return f"stores codes of {side.bits} bits"
    return None


def coded_refusal(rows: CodedRows) -> str | None:
    """Why these rows cannot be read by a kernel; None where they can."""
    keys, values = rows.keys, rows.values
    if not torch.equal(keys.counts, values.counts) or bool((keys.firsts + values.firsts).any()):
        return "has keys and values of different rows in codes"
    if keys.block_of is not None or values.block_of is not None:
        return "has groups of tokens that have lost some"
    return None


def along_tokens(codec: Codec) -> bool:
    """Whether the groups of a codec are tokens of one channel, so that scales are entries of its tables."""
    return isinstance(codec, PerChannel)


def codes_of(codec: Codec, codes: Tensor, scale: Tensor, minimum: Tensor | None) -> Codes:
    """Parts of a codec that `codec_refusal` lets pass, [batch, heads, ...] each, as the kernels take them."""
    assert isinstance(codec, _KINDS)
    return Codes(
        codes,
        scale,
        minimum,
        8 if isinstance(codec, Float8) else codec.bits,
        codec.group or codec.dim,
        "tokens" if along_tokens(codec) else "channels",
        "float8" if isinstance(codec, Float8) else codec.mode,
        codec.dim,
    )
