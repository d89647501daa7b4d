"""Keys turned by tables: the kernel says what its reference says, in place too, and leaves alone what does not turn."""

from __future__ import annotations

import pytest
import torch

from kvfoundry.kernels.rotation import naive
from kvfoundry.kernels.rotation.naive import Pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("dim", "pairs"),
    [(16, Pairs(0, 8, False)), (16, Pairs(0, 8, True)), (24, Pairs(4, 6, False)), (20, Pairs(0, 5, True))],
)
@pytest.mark.parametrize("shared", [True, False])
def test_the_kernel_turns_as_its_reference(shared, dim, pairs, dtype, device) -> None:
    from kvfoundry.kernels.rotation import fused

    generator = torch.Generator().manual_seed(dim)
    whole = torch.randn(2, 3, 40, dim, generator=generator).to(device, dtype)
    keys = whole[:, :, 3:36]  # of a longer buffer
    angle = torch.randn(2, 1 if shared else 3, 33, pairs.number, generator=generator).to(device)
    cos, sin = angle.cos(), angle.sin()
    cos[:, :, 5:9], sin[:, :, 5:9] = 1.0, 0.0
    expected = naive.turn(keys, cos, sin, pairs)
    found = fused.turn(keys, cos, sin, pairs)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6 if dtype == torch.float32 else 2**-6)
    assert torch.equal(found[:, :, 5:9], keys[:, :, 5:9]) and torch.equal(expected[:, :, 5:9], keys[:, :, 5:9])
    before = whole.clone()
    assert fused.turn(keys, cos, sin, pairs, out=keys) is keys
    assert torch.equal(keys, found)
    assert torch.equal(whole[:, :, :3], before[:, :, :3]) and torch.equal(whole[:, :, 36:], before[:, :, 36:])
