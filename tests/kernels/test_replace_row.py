"""The row that leaves: the same slots and sums as the reference, step after step, with ties and protected rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from near import assert_near

from kvfoundry.kernels.replace_row import naive


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mean": False, "normalize": True},
        {"softcap": 5.0, "sinks": True},
        {"last": True},
        {"ties": True},
        {"dtype": torch.bfloat16},
    ],
)
def test_slots_and_sums_are_those_of_the_reference(options: dict[str, Any], device: torch.device) -> None:
    from kvfoundry.kernels.replace_row import fused
    from kvfoundry.kernels.triton_support import Tuning

    options = dict(options)
    last, ties, dtype = options.pop("last", False), options.pop("ties", False), options.pop("dtype", torch.float32)
    batch, heads, width, dim = 2, 2, 40, 24
    sinks = torch.randn(4, device=device) if options.pop("sinks", False) else None
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(batch, 2 * heads, 1, dim, generator=generator).to(device, dtype)
    keys = torch.randn(batch, heads, width, dim, generator=generator).to(device, dtype)
    if ties:
        keys = keys[:, :, :1].expand_as(keys).contiguous()
    order = torch.stack([torch.randperm(width, generator=generator) for _ in range(batch)])
    positions = order[:, None].expand(batch, heads, width).contiguous().int().to(device)
    lengths = torch.tensor([[40, 40], [40, 33]], dtype=torch.int32, device=device)
    if last:
        lengths[1, 1] = 40
    position = torch.full((batch,), width - 1, device=device)
    capacities = torch.full_like(lengths, width)
    recent, first = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([3, 6], [2, 0]))
    values = torch.randn(batch, heads, width, 20, generator=generator).to(device, dtype)
    results = []
    for module in (naive, fused):
        sums = None if last else torch.rand(batch, heads, width, generator=generator.manual_seed(2)).to(device)
        if ties and sums is not None:
            sums.zero_()
        slots = torch.full_like(lengths, 99)
        tiles = {} if module is naive else {"block": 16, "tuning": Tuning(block=16, warps=4, stages=1)}
        for _ in range(2):
            output = module.attend(
                query, keys, values, positions, sums, position, slots=slots, lengths=lengths, capacities=capacities,
                recent=recent, first=first, scaling=0.3, sinks=sinks, **options, **tiles,
            )  # fmt: skip
        results.append((slots, sums, output))
    (expected, wanted, attended), (found, received, output) = results
    assert_near(output, attended, dtype)
    assert torch.equal(found, expected)
    if wanted is not None:
        inside = torch.arange(width, device=device) < lengths[..., None]
        torch.testing.assert_close(
            received[inside], wanted[inside], rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3
        )
        assert found[1, 1] == 99  # a head that is not full goes on where it was
    if ties:  # all alike: the newest that is not protected
        assert positions[0, 0, found[0, 0]] == width - 1 - 3
