"""Fused decode attention equals its reference: any lengths, layouts, masks and terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from near import assert_near

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.decode_attention import naive

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def fused() -> Any:
    from kvfoundry.kernels.decode_attention import fused

    return fused


def small(device: torch.device) -> Any:
    """Short tiles, so that a tiny problem has several parts."""
    return fused().DEFAULT if device.type == "cuda" else replace(fused().DEFAULT, block=16)


def problem(
    device: torch.device,
    dtype: torch.dtype,
    lengths: list[list[int]],
    *,
    group: int = 2,
    queries: int = 1,
    dim: int = 64,
    value_dim: int | None = None,
    capacity: int = 70,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    count = torch.tensor(lengths, dtype=torch.int32, device=device)
    batch, heads = count.shape
    query = torch.randn(batch, heads * group, queries, dim, device=device, dtype=dtype)
    keys = torch.randn(batch, heads, capacity, dim, device=device, dtype=dtype)
    values = torch.randn(batch, heads, capacity, value_dim or dim, device=device, dtype=dtype)
    # what lies behind the rows must not matter
    behind = torch.arange(capacity, device=device) >= count[..., None]
    keys[behind], values[behind] = float("nan"), float("nan")
    return query, keys, values, count


def both(device: torch.device, *arguments: Any, **terms: Any) -> None:
    expected = naive.attend(*arguments, return_lse=True, **terms)
    found = fused().attend(*arguments, return_lse=True, tuning=small(device), **terms)
    dtype = arguments[0].dtype
    assert found[0].dtype == dtype
    assert_near(found[0], expected[0], dtype)
    assert_near(found[1], expected[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_groups_and_dtypes(device: torch.device, dtype: torch.dtype, group: int) -> None:
    both(device, *problem(device, dtype, [[65, 0], [1, 33]], group=group), scaling=0.13)


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (96, 64)])
def test_head_sizes(device: torch.device, dim: int, value_dim: int) -> None:
    both(device, *problem(device, torch.float32, [[40]], dim=dim, value_dim=value_dim), scaling=dim**-0.5)


@pytest.mark.parametrize("queries", [1, 2, 5, 8])
def test_several_queries_are_causal(device: torch.device, queries: int) -> None:
    lengths = [[37, queries], [queries + 1, 1]]
    both(device, *problem(device, torch.float32, lengths, group=3, queries=queries), scaling=0.2)


def test_terms_of_the_model(device: torch.device) -> None:
    arguments = problem(device, torch.float32, [[50, 3], [0, 17]], queries=2)
    sinks = torch.randn(4, device=device)
    both(device, *arguments, scaling=0.3, softcap=5.0, sinks=sinks)
    both(device, *arguments, scaling=0.3, window=7)
    both(device, *arguments, scaling=0.3, window=1000, sinks=sinks)


@pytest.mark.parametrize("shared", [True, False])
def test_positions_decide(device: torch.device, shared: bool) -> None:
    query, keys, values, lengths = problem(device, torch.float32, [[50, 50], [40, 40]], queries=2)
    gaps = torch.randint(1, 4, (2, 1 if shared else 2, keys.shape[2]), device=device)
    positions = gaps.cumsum(dim=2).to(torch.int16)
    positions[0, 0, 5] = -1
    own = torch.stack([positions[0, 0, 48:50], positions[1, 0, 38:40]]).long()
    terms = dict(scaling=0.2, positions=positions, query_positions=own)
    both(device, query, keys, values, lengths, **terms)
    both(device, query, keys, values, lengths, window=20, **terms)


def test_ragged_stretches(device: torch.device) -> None:
    query, keys, values, lengths = problem(device, torch.bfloat16, [[65, 0, 1], [16, 31, 48]], group=4, dim=80)
    capacities = lengths.flatten().long() + torch.tensor([0, 2, 5, 0, 1, 3], device=device)
    starts = (capacities.cumsum(0) - capacities).view_as(lengths)
    slots = int(capacities.sum())
    flat_keys, flat_values = (torch.full((slots, 80), float("nan"), dtype=keys.dtype, device=device) for _ in range(2))
    positions = torch.full((slots,), -1, dtype=torch.int32, device=device)
    for row, head in ((row, head) for row in range(2) for head in range(3)):
        start, length = int(starts[row, head]), int(lengths[row, head])
        flat_keys[start : start + length] = keys[row, head, :length]
        flat_values[start : start + length] = values[row, head, :length]
        positions[start : start + length] = torch.arange(length, dtype=torch.int32, device=device) * 2
    both(device, query, flat_keys, flat_values, lengths, starts=starts, scaling=0.1)
    dense = naive.attend(query, keys, values, lengths, scaling=0.1)
    found = fused().attend(query, flat_keys, flat_values, lengths, starts=starts.int(), scaling=0.1)
    assert_near(found, dense, torch.bfloat16)
    at = torch.full((2, 1), 60, device=device)
    terms = dict(starts=starts, scaling=0.1, positions=positions, query_positions=at)
    both(device, query, flat_keys, flat_values, lengths, **terms)


def test_strided_rows_and_other_splits(device: torch.device) -> None:
    query, keys, values, lengths = problem(device, torch.float32, [[60, 25]])
    keys, values = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (keys, values))
    expected = naive.attend(query, keys, values, lengths, scaling=0.2)
    for block, programs in ((16, 1), (32, 3), (64, 4)):
        tuning = replace(fused().DEFAULT, block=block, programs=programs)
        assert_near(fused().attend(query, keys, values, lengths, scaling=0.2, tuning=tuning), expected, torch.float32)


def test_parts_merge_by_their_log_sums(device: torch.device) -> None:
    query, keys, values, lengths = problem(device, torch.float32, [[64, 64]])
    whole = naive.attend(query, keys, values, lengths, scaling=0.2)
    half = torch.full_like(lengths, 32)
    parts = [
        fused().attend(query, keys[:, :, a:b], values[:, :, a:b], half, scaling=0.2, return_lse=True)
        for a, b in ((0, 32), (32, 64))
    ]
    share = torch.softmax(torch.stack([lse for _, lse in parts]), dim=0)[..., None]
    assert_near(sum(out * s for (out, _), s in zip(parts, share, strict=True)), whole, torch.float32)


def test_refusals(device: torch.device) -> None:
    query, keys, values, lengths = problem(device, torch.float32, [[9, 9]])
    with pytest.raises(KVFoundryError, match="int32"):
        fused().attend(query, keys, values, lengths.long(), scaling=1.0)
    with pytest.raises(KVFoundryError, match="at most 8 queries"):
        fused().attend(query.expand(-1, -1, 9, -1), keys, values, lengths, scaling=1.0)
    with pytest.raises(KVFoundryError, match="query_positions"):
        fused().attend(query, keys, values, lengths, scaling=1.0, positions=lengths)
    with pytest.raises(KVFoundryError, match="evenly"):
        fused().attend(query[:, :3], keys, values, lengths, scaling=1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_graph_follows_the_lengths(device: torch.device) -> None:
    query, keys, values, lengths = problem(device, torch.bfloat16, [[500, 3], [70, 900]], capacity=1000, dim=128)
    keys, values = keys.nan_to_num(), values.nan_to_num()
    fused().attend(query, keys, values, lengths, scaling=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fused().attend(query, keys, values, lengths, scaling=0.1)
    for changed in ([[1000, 1000], [1000, 1000]], [[0, 1], [2, 999]]):
        lengths.copy_(torch.tensor(changed, dtype=torch.int32))
        graph.replay()
        assert_near(found, naive.attend(query, keys, values, lengths, scaling=0.1), torch.bfloat16)
