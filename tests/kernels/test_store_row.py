"""Storing one row per head: the same memory as the reference, step after step, past the end of a ring."""

from __future__ import annotations

import pytest
import torch

from kvfoundry.kernels.store_row import naive


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_places_are_those_of_the_reference(groups: int, dtype: torch.dtype, device: torch.device) -> None:
    from kvfoundry.kernels.store_row import fused

    batch, heads, dim, value_dim = 2, 4, 24, 16
    capacities = torch.tensor([[5, 3, 9, 4], [7, 2, 3, 6]], dtype=torch.int32, device=device)
    flat = capacities.flatten().long()
    starts = (flat.cumsum(0) - flat).view(batch, heads)
    results = []
    for module in (naive, fused):
        generator = torch.Generator().manual_seed(3)
        slots = int(flat.sum())
        keys, values = (torch.zeros(slots, width, dtype=dtype, device=device) for width in (dim, value_dim))
        positions = torch.full((slots,), -1, dtype=torch.int32, device=device)
        lengths = torch.ones(batch, heads, dtype=torch.int32, device=device)
        at, wraps = lengths.clone(), torch.ones_like(lengths)
        for step in range(9):
            fresh = torch.randn(batch, 1, heads // groups, dim + value_dim, generator=generator).to(device, dtype)
            key, value = fresh.transpose(1, 2).split([dim, value_dim], dim=3)  # strided, as a projection gives them
            module.store(
                key, value, torch.tensor([step, step + 5], device=device), keys, values, positions,
                starts=starts, slots=at, lengths=lengths, capacities=capacities, wraps=wraps,
            )  # fmt: skip
        results.append((keys, values, positions, lengths, at))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    assert torch.equal(results[0][3], capacities.clamp(max=10))  # full, but for none
    # a ring of 3 from slot 1 on holds the two newest rows there
    assert sorted(results[0][2][5:8].tolist()) == [-1, 7, 8]
