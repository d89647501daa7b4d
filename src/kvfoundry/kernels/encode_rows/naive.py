"""Reference encoding: the arithmetic of the codecs, written behind the codes that are there."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.codecs.base import Codec
from kvfoundry.codecs.fp8 import Float8
from kvfoundry.codecs.groups import PerChannel, PerToken
from kvfoundry.kernels.coded_decode.codes import Codes


def encode(rows: Tensor, into: Codes, at: Tensor) -> None:
    """Write all `rows` [batch, heads, n, dim] of every head as codes from row `at` [batch, heads] on.

    With groups of tokens, n and at are multiples of the group.
    """
    codec: Codec
    if into.mode == "float8":
        codec = Float8(into.group, dim=into.dim)
    elif into.along == "tokens":
        codec = PerChannel(into.bits, into.group, into.mode, dim=into.dim)
    else:
        codec = PerToken(into.bits, into.group, into.mode, dim=into.dim)
    heads = torch.arange(at.numel(), device=rows.device)
    write(rows.flatten(0, 1), into, codec, heads, at.flatten().long())


def write(rows: Tensor, into: Codes, codec: Codec, heads: Tensor, at: Tensor) -> None:
    """Write rows [heads, n, dim] as codes of `heads`, numbers in batch x heads, from row `at` [heads] on.

    n and at are multiples of the codec's block.
    """
    blocks = rows.unflatten(1, (-1, codec.block)).flatten(0, 1)
    found = codec.encode(blocks, torch.zeros(blocks.shape[:2], device=rows.device), {})
    parts = found.tables if into.along == "tokens" else found.rows
    for target, part, size in (
        (into.codes, found.rows["codes"], 1),
        (into.scale, parts["scale"], codec.block),
        (into.minimum, parts.get("minimum"), codec.block),
    ):
        if target is None or part is None:
            continue
        entries = part.reshape(rows.shape[0], -1, target.shape[-1])
        number = (at // size)[:, None] + torch.arange(entries.shape[1], device=rows.device)
        target.flatten(0, 1)[heads[:, None], number] = entries
