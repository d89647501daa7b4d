"""A later piece of a prompt, read in two halves without a mask, against the reference under the mask of positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvfoundry.kernels.attention import flash, halves, naive, sdpa
from kvfoundry.visibility import Visibility

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("past", [0, 1, 7, 150])
@pytest.mark.parametrize(("query_heads", "heads"), [(4, 4), (8, 2)])
@pytest.mark.parametrize("queries", [2, 33])
def test_two_halves_are_the_whole(queries, query_heads, heads, past, dtype, bound) -> None:
    generator = torch.Generator().manual_seed(past + queries)
    shapes = [(2, query_heads, queries, 16), (2, heads, past + queries, 16), (2, heads, past + queries, 16)]
    query, key, value = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    # what is left of the past lies at odd positions; the queries' own rows are the last ones
    positions = torch.cat([torch.arange(past) * 3, 3 * past + torch.arange(queries)]).to(DEVICE)
    seen = Visibility(positions[past:].expand(2, -1), positions.expand(2, 1, -1), "appended")
    expected = naive.attend(query, key, value, replace(seen, pattern="masked"), scaling=0.3).float()
    assert halves.serves(query, key, value)
    for kernel in (sdpa.attend, naive.attend, *([] if DEVICE == "cuda" else [flash.attend])):
        found = kernel(query, key, value, seen, scaling=0.3).float()
        assert float((found - expected).abs().max()) < bound * max(1.0, float(expected.abs().max()))


def test_odd_widths_take_the_mask() -> None:
    query, key = torch.randn(1, 4, 5, 12), torch.randn(1, 2, 9, 12)
    positions = torch.arange(9)
    seen = Visibility(positions[4:][None], positions[None, None], "appended")
    assert not halves.serves(query, key, key)
    found = sdpa.attend(query, key, key, seen, scaling=0.3)
    assert torch.allclose(found, naive.attend(query, key, key, replace(seen, pattern="masked"), scaling=0.3), atol=1e-5)
