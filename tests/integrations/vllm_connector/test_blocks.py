"""Rows in vLLM's blocks: read and written where the back end's kernels look for them."""

import pytest
import torch

from kvfoundry.errors import UnsupportedModelError
from kvfoundry.integrations.vllm.blocks import OrderedBlocks, PlainBlocks, found_order
from kvfoundry.integrations.vllm.loading import slot_numbers
from kvfoundry.integrations.vllm.packing import LayerShape

SHAPE = LayerShape(3, 8, 8)
MEMORY = {  # axes [blocks, heads, slots, content] in the order in which they lie in memory
    "tokens first": (0, 2, 1, 3),
    "heads first": (0, 1, 2, 3),
    "heads outermost": (1, 0, 2, 3),
}


def cache_in(order, shape) -> torch.Tensor:
    memory = torch.zeros([shape[axis] for axis in order])
    return memory.permute([order.index(axis) for axis in range(4)])


@pytest.mark.parametrize("order", MEMORY.values(), ids=MEMORY)
@pytest.mark.parametrize("shape", [SHAPE, LayerShape(3, 8, 4)])
def test_any_order_in_memory(order, shape):
    blocks = PlainBlocks(cache_in(order, (6, 3, 16, shape.key_dim + shape.value_dim)), shape)
    slots = slot_numbers((4, 1), 16, 5, 27)
    keys, values = torch.randn(3, 22, shape.key_dim), torch.randn(3, 22, shape.value_dim)
    blocks.write(slots, keys, values)
    assert torch.equal(blocks.read(slots)[0], keys) and torch.equal(blocks.read(slots)[1], values)
    assert torch.equal(blocks.cache[4, :, 5, : shape.key_dim], keys[:, 0])
    assert torch.equal(blocks.cache[1, :, 10, shape.key_dim :], values[:, -1])
    blocks.write(slots, 0 * keys, 0 * values)
    assert not blocks.cache.any(), "nothing else was written"


def test_slots_count_through_blocks_that_are_split_into_smaller_ones():
    assert slot_numbers((3, 0), 32, 30, 34).tolist() == [126, 127, 0, 1]
    blocks = PlainBlocks(torch.zeros(16, 3, 8, 16), SHAPE)  # blocks of 32 tokens, in fours
    blocks.write(slot_numbers((3, 0), 32, 30, 34), torch.ones(3, 4, 8), torch.ones(3, 4, 8))
    assert blocks.cache[15, 0, 6:, 0].tolist() == [1, 1] and blocks.cache[0, 0, :2, 0].tolist() == [1, 1]


def transposing(keys, values, key_cache, value_cache) -> None:
    """A kernel that holds keys with channels in front of slots, and values in pairs of slots."""
    heads, slots, dim = key_cache.shape[1:]
    key_cache[0].view(heads, -1)[:] = keys.permute(1, 2, 0).reshape(heads, -1)
    pairs = values.permute(1, 0, 2).reshape(heads, slots // 2, 2, dim).transpose(2, 3)
    value_cache[0].view(heads, -1)[:] = pairs.reshape(heads, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_order_of_a_kernel_is_found(dtype):
    order = found_order(3, 32, 8, dtype, transposing)
    blocks = OrderedBlocks(torch.zeros(5, 3, 32, 16, dtype=dtype), SHAPE, order)
    keys, values = torch.randn(3, 32, 8, dtype=dtype), torch.randn(3, 32, 8, dtype=dtype)
    key_cache, value_cache = blocks.cache.view(5, 3, 64, 8).chunk(2, dim=2)
    transposing(keys.transpose(0, 1), values.transpose(0, 1), key_cache[2:3], value_cache[2:3])
    slots = slot_numbers((2,), 32, 3, 20)
    assert torch.equal(blocks.read(slots)[0], keys[:, 3:20]) and torch.equal(blocks.read(slots)[1], values[:, 3:20])
    whole = blocks.cache[2].clone()
    blocks.cache.zero_()
    blocks.write(slot_numbers((2,), 32, 0, 32), keys, values)
    assert torch.equal(blocks.cache[2], whole) and not blocks.cache[3].any()


def test_a_kernel_that_changes_numbers_is_refused():
    def halving(keys, values, key_cache, value_cache):
        transposing(keys / 2, values, key_cache, value_cache)

    with pytest.raises(UnsupportedModelError, match="as they are"):
        found_order(3, 32, 8, torch.float32, halving)


@pytest.mark.parametrize(
    "cache, says",
    [
        (torch.zeros(4, 3, 16, 12), "does not hold 3 heads"),
        (torch.zeros(4, 16, 16), "does not hold 3 heads"),
        (torch.zeros(4, 3, 16, 16, dtype=torch.uint8), "torch.uint8 is not served"),
        (torch.zeros(4, 3, 16, 16).to(torch.float8_e4m3fn), "kv-cache-dtype auto"),
    ],
)
def test_other_caches_are_refused(cache, says):
    with pytest.raises(UnsupportedModelError, match=says):
        PlainBlocks(cache, SHAPE)
