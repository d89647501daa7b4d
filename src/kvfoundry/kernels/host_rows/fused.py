"""Gather of rows in pinned host memory in Triton: the GPU reads them over the link itself, without a copy in between.

Pinned memory has the same address on the device (unified addressing), so a kernel may read it like its own. Whoever
picks some thousand rows of every head would otherwise gather them on the host, at the speed of one core, or enqueue one
copy for each page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.triton_support import check_device, interpreted, launches, next_power, tl, triton

# Bytes that one program reads at a time.
_TILE = 1 << 14
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def _gather(host, index, first, used, out, width, room, WORDS: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    owner = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.load(index + owner.to(tl.int64) * width + i, mask=i < width, other=-1).to(tl.int64)
    at = wanted - tl.load(first + owner).to(tl.int64)
    there = (i < width) & (at >= 0) & (at < tl.load(used + owner).to(tl.int64))
    word = tl.arange(0, W)
    inside = there[:, None] & (word < WORDS)[None, :]
    source = owner.to(tl.int64) * room + tl.where(there, at, 0)
    tile = tl.load(host + source[:, None] * WORDS + word[None, :], mask=inside)
    target = owner.to(tl.int64) * width + i
    tl.store(out + target[:, None] * WORDS + word[None, :], tile, mask=inside)


@launches
def gather(host: Tensor, index: Tensor, first: Tensor, used: Tensor, out: Tensor) -> None:
    """As `naive.gather`; host contiguous, pinned or on the device; first and used on the device of index and out."""
    check_device(index, first, used, out)
    if not interpreted() and not host.is_cuda and not host.is_pinned():
        raise KVFoundryError("a kernel can only read host memory that is pinned.")
    if not all(tensor.is_contiguous() for tensor in (host, index, first, used, out)):
        raise KVFoundryError("rows, numbers and results must be contiguous.")
    batch, heads, width = index.shape
    if width == 0:
        return
    size = host[0, 0, 0].numel() * host.element_size()
    word = next(word for word in _WORDS if size % word == 0)
    # Rows of one number have no last dimension to view as words.
    flat_host, flat_out = (rows.reshape(batch, heads, rows.shape[2], -1) for rows in (host, out))
    words = size // word
    block = max(1, min(next_power(width), _TILE // max(size, 1)))
    block = 1 << (block.bit_length() - 1)
    _gather[(triton.cdiv(width, block), batch * heads)](
        flat_host.view(_WORDS[word]),
        index,
        first,
        used,
        flat_out.view(_WORDS[word]),
        width,
        host.shape[2],
        WORDS=words,
        W=next_power(words),
        BLOCK=block,
        num_warps=4,
    )
