"""Fused prompt attention and its column sums equal their reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from near import assert_near

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.prefill_attention import naive


def check(
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    heads: int = 1,
    group: int = 2,
    queries: int = 40,
    rows: int = 40,
    dim: int = 64,
    **terms: Any,
) -> None:
    from kvfoundry.kernels.prefill_attention import fused
    from kvfoundry.kernels.prefill_attention.columns import COLUMNS
    from kvfoundry.kernels.prefill_attention.forward import FORWARD

    query = torch.randn(batch, heads * group, queries, dim, device=device, dtype=dtype)
    key, value = (torch.randn(batch, heads, rows, dim, device=device, dtype=dtype) for _ in range(2))
    expected = naive.attend(query, key, value, scaling=0.2, **terms)
    tunings: dict[str, Any] = {}
    if device.type != "cuda":
        tunings = {
            "forward_tuning": replace(FORWARD, block=16),
            "columns_tuning": replace(COLUMNS, block=16),
            "query_block": 16,
            "column_query_block": 16,
        }
    found = fused.attend(query, key, value, scaling=0.2, **terms, **tunings)
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs, dtype)
    assert found.sums.sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80])
def test_dtypes(device: torch.device, dtype: torch.dtype, dim: int) -> None:
    check(device, dtype=dtype, dim=dim, last=5)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_groups(device: torch.device, group: int) -> None:
    check(device, heads=2, group=group, queries=18, rows=18, last=4)


@pytest.mark.parametrize(("queries", "rows"), [(1, 1), (1, 33), (17, 33), (32, 48), (33, 33)])
@pytest.mark.parametrize("last", [0, 8, 100])
def test_queries_at_the_end(device: torch.device, queries: int, rows: int, last: int) -> None:
    check(device, queries=queries, rows=rows, last=last)


def test_terms_of_the_model(device: torch.device) -> None:
    check(device, softcap=4.0, sinks=torch.randn(2, device=device), last=7)
    for window in (1, 9, 100):
        check(device, window=window, rows=50, last=20)


@pytest.mark.parametrize("shared", [True, False])
def test_positions_and_padding(device: torch.device, shared: bool) -> None:
    own = torch.stack([torch.arange(30), torch.cat([torch.full((12,), -1), torch.arange(18)])]).to(device)
    heads = 1 if shared else 2
    at = own[:, None].expand(-1, heads, -1).clone().to(torch.int16)
    at[0, -1, 3] = -1
    at[0, :, 10:] += 2
    own[0, 10:] += 2
    terms = dict(batch=2, heads=2, queries=30, rows=30, last=6, query_positions=own, key_positions=at)
    check(device, **terms)  # type: ignore[arg-type]
    check(device, window=5, **terms)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "chosen", [[[0, 1, 50, 69], [3, 69]], [list(range(0, 70, 3)), list(range(40, 60))], [[69], [0]]]
)
def test_queries_here_and_there(device: torch.device, chosen: list[list[int]]) -> None:
    from kvfoundry.kernels.attention.span import Span
    from kvfoundry.kernels.prefill_attention.forward import FORWARD, forward

    columns = max(map(len, chosen))
    own = torch.tensor([one + [-1] * (columns - len(one)) for one in chosen])
    span = Span(torch.where(own < 0, 1 << 40, own).amin(dim=0), own.amax(dim=0))
    query = torch.randn(2, 4, columns, 64, device=device)
    key, value = torch.randn(2, 2, 2, 70, 64, device=device)
    at = torch.arange(70, device=device).expand(2, 1, 70).clone()
    at[1, 0, int(max(chosen[1])) + 1 :] = -1  # a shorter text
    places = dict(query_positions=own.to(device), key_positions=at)
    tuning = FORWARD if device.type == "cuda" else replace(FORWARD, block=16)
    found, _ = forward(query, key, value, scaling=0.2, span=span, tuning=tuning, query_block=16, **places)
    expected = naive.attend(query, key, value, scaling=0.2, **places).output
    for row, one in enumerate(chosen):
        assert_near(found[row, :, : len(one)], expected[row, :, : len(one)], torch.float32)


def test_refusals(device: torch.device) -> None:
    from kvfoundry.kernels.prefill_attention import fused

    rows = torch.randn(1, 2, 8, 64, device=device)
    with pytest.raises(KVFoundryError, match="fewer rows"):
        fused.attend(rows, rows[:, :, :4], rows[:, :, :4], scaling=1.0)
    with pytest.raises(KVFoundryError, match="for neither"):
        fused.attend(rows, rows, rows, scaling=1.0, query_positions=torch.zeros(1, 8, device=device))
