"""Rows in vLLM's blocks: where the numbers of a token lie, read off the attention back end, and read and written there.

vLLM shows every back end's cache of one layer as [blocks, heads, slots, content], whatever the order in memory. On GPUs
the content is a token's key and behind it its value. The CPU kernels use the same memory as [blocks, heads, 2 x slots x
dim], keys first, in an order that depends on the instruction set; it is found by writing numbers through the kernel
and looking where they went (`found_order`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfoundry.errors import UnsupportedModelError
from kvfoundry.integrations.vllm.packing import LayerShape, Rows

# Back ends that hold a token's content as key, then value.
PLAIN_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
CPU_BACKEND = "CPU_ATTN"
# Digits of a number that every float dtype holds exactly.
_BASE = 128


def check_cache(cache: Tensor, shape: LayerShape) -> None:
    """UnsupportedModelError unless a cache holds rows of this shape as plain numbers."""
    content = shape.key_dim + shape.value_dim
    if cache.dim() != 4 or cache.shape[1] != shape.heads or cache.shape[3] != content:
        raise UnsupportedModelError(
            f"a cache of shape {list(cache.shape)} does not hold {shape.heads} heads of {content} numbers a token."
        )
    if not cache.dtype.is_floating_point or cache.dtype.itemsize < 2:
        raise UnsupportedModelError(f"a cache in {cache.dtype} is not served; use --kv-cache-dtype auto.")


class LayerBlocks(ABC):
    """The cache of one layer: [blocks, heads, slots, content]. Slot numbers count through all blocks."""

    def __init__(self, cache: Tensor, shape: LayerShape):
        check_cache(cache, shape)
        self.cache, self.shape, self.slots = cache, shape, cache.shape[2]

    def _place(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Block and offset of slot numbers."""
        return slots // self.slots, slots % self.slots

    @abstractmethod
    def read(self, slots: Tensor) -> Rows:
        """A copy of keys and values [heads, tokens, dim] at slot numbers [tokens], which are on the cache's device."""

    @abstractmethod
    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put rows where `read` finds them."""


class PlainBlocks(LayerBlocks):
    """Key and value side by side."""

    def read(self, slots: Tensor) -> Rows:
        block, offset = self._place(slots)
        rows = self.cache[block, :, offset].transpose(0, 1)  # [heads, tokens, content]
        return rows[..., : self.shape.key_dim], rows[..., self.shape.key_dim :]

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        block, offset = self._place(slots)
        self.cache[block, :, offset] = torch.cat([keys, values], dim=-1).transpose(0, 1).to(self.cache.dtype)


@dataclass(frozen=True, eq=False)
class Order:
    """Where the kernel puts the numbers of a token in the part of its block and head: [slots, dim] each."""

    keys: Tensor
    values: Tensor


class OrderedBlocks(LayerBlocks):
    """Keys in the first half of a block, values in the second, each in the kernel's own order."""

    def __init__(self, cache: Tensor, shape: LayerShape, order: Order):
        super().__init__(cache, shape)
        if shape.key_dim != shape.value_dim or not cache.is_contiguous():
            raise UnsupportedModelError("keys and values of different widths are not served on the CPU.")
        self._flat = cache.view(cache.shape[0], cache.shape[1], -1)
        self._order = Order(order.keys, order.values + self.slots * shape.key_dim)

    def read(self, slots: Tensor) -> Rows:
        block, offset = self._place(slots)
        keys, values = (self._flat[block[:, None], :, each[offset]] for each in (self._order.keys, self._order.values))
        return keys.permute(2, 0, 1), values.permute(2, 0, 1)  # from [tokens, dim, heads]

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        block, offset = self._place(slots)
        for each, rows in ((self._order.keys, keys), (self._order.values, values)):
            self._flat[block[:, None], :, each[offset]] = rows.permute(1, 2, 0).to(self._flat.dtype)


def found_order(
    heads: int, slots: int, dim: int, dtype: torch.dtype, put: Callable[[Tensor, Tensor, Tensor, Tensor], None]
) -> Order:
    """The order of a kernel. put: writes keys and values [tokens, heads, dim] into caches [1, heads, slots, dim] each.

    Every number of a token is told apart by its digits, written one after the other. UnsupportedModelError when what
    comes back is no order: the kernel then changes numbers, or spreads them over several places.
    """
    numbers = torch.arange(slots * dim).view(slots, 1, dim).expand(-1, heads, -1)
    found = [torch.zeros(slots * dim, dtype=torch.long) for _ in range(2)]
    scale = 1
    while scale < slots * dim:
        digit = (numbers // scale % _BASE).to(dtype).contiguous()
        cache = torch.zeros(1, heads, 2 * slots, dim, dtype=dtype)
        key_cache, value_cache = cache.chunk(2, dim=2)
        put(digit, digit, key_cache, value_cache)
        for sums, part in zip(found, (key_cache, value_cache), strict=True):
            head = part[0, 0].reshape(-1)
            if any(not torch.equal(part[0, other].reshape(-1), head) for other in range(heads)):
                raise UnsupportedModelError("the attention kernel orders the rows of its heads differently.")
            sums += head.long() * scale
        scale *= _BASE
    places = []
    for sums in found:
        if not torch.equal(sums.sort().values, torch.arange(slots * dim)):
            raise UnsupportedModelError("the attention kernel does not hold the numbers of a row as they are.")
        places.append(sums.argsort().view(slots, dim))
    return Order(*places)
