"""Reference encoding: the arithmetic of the codecs, written behind the codes that are there."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.codecs.fp8 import Float8
from kvfoundry.codecs.groups import PerChannel, PerToken
from kvfoundry.kernels.coded_decode.codes import Codes


def encode(rows: Tensor, into: Codes, at: Tensor) -> None:
    """Write all `rows` [batch, heads, n, dim] of every head as codes from row `at` [batch, heads] on.

    With groups of tokens, n and at are multiples of the group.
    """
    codec: Float8 | PerChannel | PerToken
    if into.mode == "float8":
        codec = Float8(into.group, dim=into.dim)
    elif into.along == "tokens":
        codec = PerChannel(into.bits, into.group, into.mode, dim=into.dim)
    else:
        codec = PerToken(into.bits, into.group, into.mode, dim=into.dim)
    block = codec.block
    number = rows.shape[2]
    for batch in range(rows.shape[0]):
        for head in range(rows.shape[1]):
            blocks = rows[batch, head].unflatten(0, (-1, block))
            written = codec.encode(blocks, torch.zeros(blocks.shape[:2], device=rows.device), {})
            first = int(at[batch, head])
            into.codes[batch, head, first : first + number] = written.rows["codes"].flatten(0, 1)
            parts = written.tables if into.along == "tokens" else written.rows
            for target, name in ((into.scale, "scale"), (into.minimum, "minimum")):
                if target is not None:
                    part = parts[name] if into.along == "tokens" else parts[name].flatten(0, 1)
                    target[batch, head, first // block : first // block + part.shape[0]] = part
