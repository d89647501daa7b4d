"""Fused attention over an index equals its reference, and both equal dense attention where the index covers all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from near import assert_near

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.prefill_attention import naive as dense
from kvfoundry.kernels.sparse_prefill import BlockIndex, Tiles, naive
from kvfoundry.kernels.sparse_prefill.index import merged

LENGTHS, COUNTS = [[100, 93], [70, 41]], [60, 33]


def index_of(tiles: Tiles, query_heads: int, *, width: int, columns: int, per_tile: bool = False) -> BlockIndex:
    """A random index: for every head, or for every tile, the tile's own blocks and others; and single rows."""
    device, batch = tiles.lengths.device, tiles.lengths.shape[0]
    tops = tiles.per_query_head(tiles.tops, query_heads)
    rank = torch.rand(batch, query_heads, tiles.number if per_tile else 1, tiles.blocks, device=device)
    rank[..., : tiles.ratio] = -1.0
    distances = rank.argsort(dim=-1)[..., :width].sort(dim=-1).values
    counts = (distances <= tops[..., None]).sum(dim=-1)
    rows = torch.rand(batch, query_heads, tiles.blocks * tiles.key_block, device=device).argsort(dim=-1)[..., :columns]
    covered = torch.zeros(batch, query_heads, tiles.blocks, dtype=torch.bool, device=device)
    if not per_tile:
        covered.scatter_(2, distances[:, :, 0], True)
    return BlockIndex.of(tiles, tops, distances, counts, rows, covered)


def problem(device: torch.device, dtype: torch.dtype, *, heads: int = 2, group: int = 2, dim: int = 64) -> Any:
    rows, queries = max(map(max, LENGTHS)), max(COUNTS)
    query = torch.randn(2, heads * group, queries, dim, device=device, dtype=dtype)
    key, value = (torch.randn(2, heads, rows, dim, device=device, dtype=dtype) for _ in range(2))
    return query, key, value


def tiles_of(device: torch.device, query_block: int, key_block: int, heads: int = 2) -> Tiles:
    lengths = torch.tensor(LENGTHS)[:, :heads]
    return Tiles.of(lengths, torch.tensor(COUNTS), query_block, key_block, device)


def check(device: torch.device, index: BlockIndex, tensors: Any, **terms: Any) -> None:
    from kvfoundry.kernels.sparse_prefill import fused

    expected = naive.attend(*tensors, index, scaling=0.2, **terms)
    tuning = replace(fused.DEFAULT, block=16) if device.type != "cuda" else fused.DEFAULT
    found = fused.attend(*tensors, index, scaling=0.2, tuning=tuning, **terms)
    assert_near(found, expected, tensors[0].dtype)
    assert not found[1, :, COUNTS[1] :].any()  # queries that the shorter batch row does not have


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80])
def test_dtypes(device: torch.device, dtype: torch.dtype, dim: int) -> None:
    check(device, index_of(tiles_of(device, 32, 16), 4, width=3, columns=9), problem(device, dtype, dim=dim))


@pytest.mark.parametrize(("query_block", "key_block"), [(16, 16), (32, 16), (32, 32), (64, 16)])
@pytest.mark.parametrize("per_tile", [False, True])
def test_tiles(device: torch.device, query_block: int, key_block: int, per_tile: bool) -> None:
    tiles = tiles_of(device, query_block, key_block)
    width = min(tiles.ratio + 1, tiles.blocks)
    index = index_of(tiles, 4, width=width, columns=0 if per_tile else 20, per_tile=per_tile)
    assert int(index.computed) < index.causal
    check(device, index, problem(device, torch.float32))


@pytest.mark.parametrize("group", [1, 3, 8])
def test_groups(device: torch.device, group: int) -> None:
    index = index_of(tiles_of(device, 32, 16, heads=1), group, width=3, columns=5)
    check(device, index, problem(device, torch.float32, heads=1, group=group, dim=16))


def test_terms_of_the_model(device: torch.device) -> None:
    index = index_of(tiles_of(device, 32, 16), 4, width=2, columns=30)
    check(device, index, problem(device, torch.float32), softcap=4.0, sinks=torch.randn(4, device=device))


def test_heads_with_lists_of_their_own_and_heads_with_single_rows(device: torch.device) -> None:
    tiles = tiles_of(device, 32, 16)
    parts = []
    for heads, per_tile in (([2, 0], True), ([1, 3], False)):
        whole = index_of(tiles, 4, width=3, columns=0 if per_tile else 12, per_tile=per_tile)
        chosen = torch.tensor(heads, device=device)
        names = ("distances", "counts", "columns", "column_counts", "single")
        own = replace(whole, **{name: getattr(whole, name).index_select(1, chosen) for name in names})
        parts.append((chosen, own))
    index = merged(parts, 4)
    assert torch.equal(index.counts[:, 2], parts[0][1].counts[:, 0])
    assert torch.equal(index.column_counts[:, 3], parts[1][1].column_counts[:, 1])
    check(device, index, problem(device, torch.float32))


@pytest.mark.parametrize("query_block", [16, 64])
def test_an_index_of_everything_is_dense_attention(device: torch.device, query_block: int) -> None:
    from kvfoundry.kernels.sparse_prefill import fused

    tiles = tiles_of(device, query_block, 16)
    tensors = problem(device, torch.float32)
    index = index_of(tiles, 4, width=tiles.blocks, columns=0)
    assert int(index.computed) == index.causal
    outputs = [module.attend(*tensors, index, scaling=0.2) for module in (naive, fused)]
    for row, count in enumerate(COUNTS):
        for head, length in enumerate(LENGTHS[row]):
            query, key, value = (tensor[row : row + 1] for tensor in tensors)
            own = slice(2 * head, 2 * head + 2)
            stored = (tensor[:, head : head + 1, :length] for tensor in (key, value))
            expected = dense.attend(query[:, own, :count], *stored, scaling=0.2).output
            for output in outputs:
                assert_near(output[row : row + 1, own, :count], expected, torch.float32)


def test_a_tile_whose_list_costs_as_much_as_everything_reads_everything() -> None:
    tiles = Tiles.of(torch.tensor([[64]]), torch.tensor([64]), 16, 16, "cpu")
    tops, columns = tiles.tops, torch.arange(16, 48).view(1, 1, -1)
    covered = torch.tensor([[[True, False, False, False]]])
    index = BlockIndex.of(tiles, tops, torch.zeros(1, 1, 1, 1).long(), torch.ones(1, 1, 4).long(), columns, covered)
    # tiles see 1, 2, 3 and 4 blocks; a block and the single rows below their end are 1, 1 + 1, 1 + 2 and 1 + 2 blocks
    assert index.counts.tolist() == [[[1, 2, 3, 1]]] and index.column_counts.tolist() == [[[0, 0, 0, 32]]]
    assert (int(index.computed), index.causal) == (9, 10)


def test_refusals(device: torch.device) -> None:
    from kvfoundry.kernels.sparse_prefill import fused

    tiles = tiles_of(device, 16, 8)
    with pytest.raises(KVFoundryError, match="power of two of at least 16, not 8"):
        fused.attend(*problem(device, torch.float32), index_of(tiles, 4, width=3, columns=0), scaling=1.0)
    with pytest.raises(KVFoundryError, match="no multiple"):
        tiles_of(device, 24, 16)
    with pytest.raises(KVFoundryError, match="fewer rows than queries"):
        Tiles.of(torch.tensor([[8]]), torch.tensor([9]), 16, 16, device)
