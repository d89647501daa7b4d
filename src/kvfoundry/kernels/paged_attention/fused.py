"""Paged attention in Triton: a list of pages per head, read by the kernel of `decode_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.kernels.decode_attention import fused as decode
from kvfoundry.kernels.triton_support import Tuning

DEFAULT = Tuning(block=128, warps=4, stages=2, programs=2)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    starts: Tensor,
    lengths: Tensor,
    page: int,
    real: Tensor | None = None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    counts: Tensor | None = None,
    tuning: Tuning = DEFAULT,
) -> Tensor:
    """As `naive.attend` over plain tensors; padding needs no flag here (`real` is not looked at).

    pages: int32; starts, lengths: integers on the device. counts: [batch, heads] int32, entries of `pages` to look at;
    counted from the table where they are not given.
    """
    if counts is None:
        counts = (pages >= 0).sum(dim=-1, dtype=torch.int32)
    output = decode.launch(
        query[:, :, None],
        keys,
        values,
        lengths.to(torch.int32).contiguous(),
        scaling=scaling,
        starts=starts.contiguous(),
        positions=None,
        query_positions=None,
        softcap=softcap,
        sinks=sinks,
        window=None,
        return_lse=False,
        tuning=tuning,
        pages=pages.to(torch.int32).contiguous(),
        counts=counts.contiguous(),
        page=page,
    )
    assert isinstance(output, Tensor)
    return output[:, :, 0]
