"""Rows picked out of host memory: the kernel that reads over the link finds what the reference finds."""

from __future__ import annotations

import pytest
import torch

from kvfoundry.kernels.host_rows import naive


@pytest.mark.parametrize(("trailing", "dtype"), [((16,), torch.bfloat16), ((24,), torch.float32), ((7,), torch.uint8),
                                                 ((), torch.int32), ((3,), torch.float16)])  # fmt: skip
@pytest.mark.parametrize("width", [1, 70])
def test_rows_are_those_of_the_reference(trailing, dtype, width: int, device: torch.device) -> None:
    from kvfoundry.kernels.host_rows import fused

    generator = torch.Generator().manual_seed(width)
    host = (torch.rand(2, 3, 40, *trailing, generator=generator) * 200).to(dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    index = torch.randint(-1, 50, (2, 3, width), generator=generator).to(device)
    first, used = torch.tensor([[0, 3, 5], [9, 2, 0]]).to(device), torch.tensor([[40, 12, 0], [1, 7, 39]]).to(device)
    results = []
    for module in (naive, fused):
        out = torch.full((2, 3, width, *trailing), 9, dtype=dtype, device=device)
        module.gather(host, index, first, used, out)
        results.append(out)
    assert torch.equal(*results)
    on_device = torch.full((2, 3, width, *trailing), 9, dtype=dtype, device=device)
    fused.gather(host.to(device), index, first, used, on_device)
    assert torch.equal(on_device, results[0])
    at = index - first[..., None]
    missed = (at < 0) | (at >= used[..., None])
    assert bool((results[0][missed] == 9).all())
