"""What lanes do together, as whole matrices say it: instructions of the GPU, or their twins in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor


def words(matrix: Tensor) -> Tensor:
    """Words of two neighbouring numbers of bfloat16 in every row, lane by lane: [8, 8] as [32] int32."""
    return matrix.to(torch.bfloat16).contiguous().view(torch.int32).reshape(32)


@pytest.fixture
def run(device: torch.device) -> Callable[..., Tensor]:
    """Calls of the functions, on what kernels run on."""
    from lane_calls import call

    return partial(call, device)


def test_multiply(run) -> None:
    a, b, c = torch.randn(16, 16).bfloat16(), torch.randn(16, 8).bfloat16(), torch.randn(16, 8)
    a[:, 3] *= 2.0**-126  # subnormal numbers count
    b[3] *= 2.0**100
    pieces = [
        words(a[:8, :8]),
        words(a[8:, :8]),
        words(a[:8, 8:]),
        words(a[8:, 8:]),
        words(b.T[:, :8]),
        words(b.T[:, 8:]),
    ]
    sums = [
        c[rows].reshape(8, 4, 2)[..., column].reshape(32) for rows in (slice(0, 8), slice(8, 16)) for column in (0, 1)
    ]
    found = run("multiply", *pieces, *sums).view(torch.float32).reshape(2, 2, 8, 4)
    torch.testing.assert_close(
        found.permute(0, 2, 3, 1).reshape(16, 8), a.float() @ b.float() + c, rtol=1e-4, atol=1e-4
    )


def test_transposed(run) -> None:
    matrix = torch.randn(8, 8).bfloat16()
    assert torch.equal(run("transposed", words(matrix), words(matrix))[0], words(matrix.T))


def test_from_lane(run) -> None:
    value, lane = torch.randn(32), torch.randint(0, 32, (32,), dtype=torch.int32)
    assert torch.equal(run("from_lane", value, lane)[0].view(torch.float32), value[lane])


@pytest.mark.parametrize("number", [0, 1])
def test_halves(run, number: int) -> None:
    left, right = torch.randn(2, 32, 2).bfloat16()
    expected = torch.stack([left[:, number], right[:, number]], dim=1)
    assert torch.equal(run("halves", left, right, number=number)[0], words(expected.reshape(8, 8)))


def test_pair(run) -> None:
    low, high = torch.randn(2, 32)
    assert torch.equal(run("pair", low, high)[0], words(torch.stack([low, high], dim=1).reshape(8, 8)))


def test_times(run) -> None:
    left, right = torch.randn(2, 8, 8).bfloat16()
    assert torch.equal(run("times", words(left), words(right))[0], words(left * right))
