"""Attention of scattered queries, in two joined halves, against the reference kernel under one mask."""

from __future__ import annotations

import pytest
import torch

from kvfoundry.blend.layer import Pass
from kvfoundry.kernels.attention import halves, naive, scattered
from kvfoundry.visibility import Visibility

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [7, 16, 100])
@pytest.mark.parametrize(
    "chosen",
    [
        [[0, 1, 2, 3]],
        [[5, 90, 91, 92, 199]],
        [list(range(0, 200, 3))],
        [list(range(200))],
        [[199]],
        [list(range(60, 200, 2)), [3, 50]],
        [[150, 199], list(range(100))],
    ],
    ids=["first", "few", "every third", "all", "last", "shorter row", "other places"],
)
def test_halves_joined_are_the_whole(chosen: list[list[int]], block: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch, rows = len(chosen), 200
    step = Pass([torch.tensor(own) for own in chosen])
    lengths = torch.tensor([rows, 110][:batch] if max(chosen[-1]) < 110 else [rows] * batch)
    places = torch.arange(rows)
    positions = torch.where(places < lengths[:, None], places, -1)[:, None]
    query = torch.randn(batch, 8, step.columns, 16, dtype=dtype)
    key, value = torch.randn(2, batch, 2, rows, 16, dtype=dtype)
    assert halves.serves(query, key, value)
    visibility = Visibility(step.positions(CPU), positions, "masked")
    span = step.sight(0, lengths, CPU)[1]
    found = scattered.attend(query, key, value, visibility, span, scaling=0.3, block=block)
    wanted = naive.attend(query.float(), key.float(), value.float(), visibility, scaling=0.3)
    for row, own in enumerate(chosen):
        torch.testing.assert_close(
            found[row, :, : len(own)].float(), wanted[row, :, : len(own)],
            rtol=0.0, atol=1e-5 if dtype == torch.float32 else 2e-2,
        )  # fmt: skip


def test_odd_widths_are_left_to_the_backend() -> None:
    query, key = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 9, 16)
    assert not halves.serves(query, key, torch.zeros(1, 2, 9, 8))
    assert not halves.serves(query[..., :12], key[..., :12], key[..., :12])
