"""Column sums without a stored weight equal those of the whole matrix, for every mask that they serve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from near import assert_near

from kvfoundry.kernels.attention import sdpa
from kvfoundry.kernels.attention.remembering import Remembering
from kvfoundry.kernels.column_sums import column_sums, naive
from kvfoundry.visibility import Visibility, WindowRule


def tunings(device: torch.device) -> dict[str, Any]:
    from kvfoundry.kernels.prefill_attention.columns import COLUMNS

    return {} if device.type == "cuda" else {"tuning": replace(COLUMNS, block=16), "query_block": 16}


def prompt(device: torch.device, dtype: torch.dtype = torch.float32, dim: int = 64) -> tuple[torch.Tensor, ...]:
    query = torch.randn(2, 4, 40, dim, device=device, dtype=dtype)
    key = torch.randn(2, 2, 40, dim, device=device, dtype=dtype)
    positions = torch.arange(40, device=device).repeat(2, 1)
    positions[1, 27:] = -1
    return query, key, positions


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_a_prompt_with_padding_behind_it(device: torch.device, softcap: float | None) -> None:
    from kvfoundry.kernels.column_sums import fused

    query, key, positions = prompt(device)
    seen = Visibility(positions, positions[:, None], "causal")
    expected = naive.column_sums(query, key, seen, scaling=0.2, softcap=softcap)
    found = fused.column_sums(query, key, seen, scaling=0.2, softcap=softcap, **tunings(device))
    # the naive sums of rows behind the shorter text are zero, whatever is asked of its padding
    assert_near(found, expected, torch.float32)
    assert float(found[1].sum()) == pytest.approx(4 * 27, rel=1e-3)


@pytest.mark.parametrize("window", [None, 9])
def test_rows_of_earlier_calls(device: torch.device, window: int | None) -> None:
    from kvfoundry.kernels.column_sums import fused

    query, key, positions = prompt(device)
    rows = torch.arange(40, device=device).repeat(2, 2, 1).to(torch.int16)
    rows[0, 1, 30:] = -1
    late = positions.where(positions < 0, positions + 5)
    seen = Visibility(late, rows, "masked", WindowRule(sliding=window))
    sinks = torch.randn(4, device=device)
    expected = naive.column_sums(query, key, seen, scaling=0.2, sinks=sinks)
    found = fused.column_sums(query, key, seen, scaling=0.2, sinks=sinks, **tunings(device))
    assert_near(found, expected, torch.float32)


@pytest.mark.parametrize("queries", [3, 40])
@pytest.mark.parametrize("given", [False, True])
def test_logs_of_sums_are_those_of_attention(device: torch.device, queries: int, given: bool) -> None:
    """Rows cut into parts or not, sinks and a soft-cap, and a query that sees nothing."""
    from kvfoundry.kernels.prefill_attention.forward import forward
    from kvfoundry.kernels.prefill_attention.log_sums import LOG_SUMS, log_sums

    query, key, _ = prompt(device)
    query = query[:, :, :queries].contiguous()
    terms: dict[str, Any] = {"scaling": 0.2, "softcap": 5.0, "window": None if given else 9}
    if given:
        terms["query_positions"] = torch.arange(queries, device=device).repeat(2, 1) * 3 - 1
        terms["key_positions"] = torch.arange(40, device=device).repeat(2, 1, 1)
    sinks = torch.randn(4, device=device)
    small = {"tuning": replace(LOG_SUMS, block=16), "query_block": 16}
    for sink in (None, sinks):
        found = log_sums(query, key, sinks=sink, **terms, **small)
        _, expected = forward(query, key, key, sinks=sink, **terms)
        assert_near(found, expected, torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_attention_remembers_is_what_the_sums_need(device: torch.device) -> None:
    query, key, positions = prompt(device, torch.bfloat16)
    seen = Visibility(positions, positions[:, None], "causal")
    attend = Remembering(sdpa.attend)
    output = attend(query, key, key, seen, scaling=0.2)
    assert attend.query is query and attend.lse is not None and attend.lse.shape == (2, 4, 40)
    assert_near(output, sdpa.attend(query, key, key, seen, scaling=0.2), torch.bfloat16)
    found = column_sums(query, key, seen, scaling=0.2, lse=attend.lse)
    assert_near(found, naive.column_sums(query, key, seen, scaling=0.2), torch.bfloat16)
