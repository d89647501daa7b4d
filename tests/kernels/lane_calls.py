"""A kernel that calls what `kernels.warp` offers; imported where Triton is there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfoundry.kernels import warp
from kvfoundry.kernels.triton_support import interpreted, tl, triton


@triton.jit
def _call(into, given, NAME: tl.constexpr, NUMBER: tl.constexpr, PTX: tl.constexpr):
    lane = tl.arange(0, 32)
    if NAME == "multiply":
        operands = ()
        for i in tl.static_range(6):
            operands += (tl.load(given + i * 32 + lane),)
        for i in tl.static_range(6, 10):
            operands += (tl.load(given + i * 32 + lane).to(tl.float32, bitcast=True),)
        found = warp.multiply(*operands, PTX)
        for i in tl.static_range(4):
            tl.store(into + i * 32 + lane, found[i].to(tl.int32, bitcast=True))
    else:
        one, other = tl.load(given + lane), tl.load(given + 32 + lane)
        if NAME == "transposed":
            result = warp.transposed(one, PTX)
        elif NAME == "from_lane":
            result = warp.from_lane(one, other, PTX)
        elif NAME == "halves":
            result = warp.halves(one, other, NUMBER, PTX)
        elif NAME == "pair":
            result = warp.pair(one.to(tl.float32, bitcast=True), other.to(tl.float32, bitcast=True), PTX)
        else:
            result = warp.times(one, other, PTX)
        tl.store(into + lane, result)


def call(device: torch.device, name: str, *lanes: Tensor, number: int = 0) -> Any:
    """The function's results on tensors of 32 lanes, [4, 32] int32, of which `multiply` fills all."""
    given = torch.stack([each.contiguous().view(torch.int32).reshape(32) for each in lanes]).to(device)
    into = torch.zeros(4, 32, dtype=torch.int32, device=device)
    _call[(1,)](into, given, NAME=name, NUMBER=number, PTX=not interpreted(), num_warps=1)
    return into.cpu()
