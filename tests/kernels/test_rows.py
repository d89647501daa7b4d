"""Gather and encoding of rows: the same bits as their references."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.coded_decode import Codes
from kvfoundry.kernels.encode_rows import naive as encoding
from kvfoundry.kernels.gather_rows import naive as gathering


def test_gather_dense_and_flat(device: torch.device) -> None:
    from kvfoundry.kernels.gather_rows import fused

    keys = torch.randn(2, 2, 50, 80, device=device).bfloat16()
    values = torch.randn(2, 2, 50, 64, device=device).bfloat16()
    keep = torch.rand(2, 2, 50, device=device) < 0.5
    keep[0, 1] = False
    slots = gathering.kept_slots(keep, 50)
    for row, head in ((row, head) for row in range(2) for head in range(2)):
        expected = keep[row, head].nonzero()[:, 0]
        assert torch.equal(slots[row, head, : expected.numel()].long(), expected)
        assert (slots[row, head, expected.numel() :] == -1).all()
    counts = keep.sum(dim=-1).flatten()
    starts = (counts.cumsum(0) - counts).view(2, 2)
    total = int(counts.sum())
    for source, destination in ((None, None), (None, starts), (starts, None)):
        results = []
        for function in (gathering.gather, fused.gather):
            rows = (keys, values) if source is None else (keys.flatten(0, 2), values.flatten(0, 2))
            first = None if source is None else (torch.arange(4, device=device) * 50).view(2, 2)
            shape = (2, 2, 60) if destination is None else (total,)
            out = [torch.full((*shape, dim), 7.0, dtype=keys.dtype, device=device) for dim in (80, 64)]
            function(*rows, slots, *out, starts=first, starts_out=destination)
            results.append(out)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def buffers(rows: torch.Tensor, bits: int, group: int, along: Any, mode: str, capacity: int = 64) -> Codes:
    batch, heads, _, dim = rows.shape
    group = group if along == "tokens" else min(group, dim)
    shape = (capacity // group, dim) if along == "tokens" else (capacity, -(-dim // group))
    scale = rows.new_zeros(batch, heads, *shape)
    minimum = {"asymmetric": scale.clone(), "zero_point": scale.to(torch.uint8)}.get(mode)
    codes = torch.zeros(batch, heads, capacity, -(-dim * bits // 8), dtype=torch.uint8, device=rows.device)
    return Codes(codes, scale, minimum, bits, group, along, mode, dim)  # type: ignore[arg-type]


def check(device: torch.device, dim: int, dtype: torch.dtype, bits: int, group: int, along: Any, mode: str) -> None:
    from kvfoundry.kernels.encode_rows import fused

    rows = torch.randn(2, 2, 32, dim, device=device).to(dtype)
    rows[0, 0, :16] = rows[0, 0, :1]  # groups of equal numbers
    at = torch.tensor([[0, 16], [32, 0]], dtype=torch.int32, device=device)
    ours, theirs = (buffers(rows, bits, group, along, mode) for _ in range(2))
    fused.encode(rows, ours, at)
    encoding.encode(rows, theirs, at)
    assert theirs.codes.any()
    assert torch.equal(ours.codes, theirs.codes)
    assert torch.equal(ours.scale, theirs.scale)
    assert theirs.minimum is None or (ours.minimum is not None and torch.equal(ours.minimum, theirs.minimum))


@pytest.mark.parametrize("along", ["channels", "tokens"])
@pytest.mark.parametrize("mode", ["asymmetric", "symmetric", "symmetric_full", "zero_point"])
def test_modes(device: torch.device, along: str, mode: str) -> None:
    check(device, 64, torch.float32, 4, 16, along, mode)


@pytest.mark.parametrize("along", ["channels", "tokens"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [1, 2, 8])
def test_bits_and_dtypes(device: torch.device, along: str, dtype: torch.dtype, bits: int) -> None:
    check(device, 64, dtype, bits, 16, along, "asymmetric")


@pytest.mark.parametrize(("dim", "group"), [(80, 32), (96, 128), (128, 32)])
def test_head_sizes(device: torch.device, dim: int, group: int) -> None:
    check(device, dim, torch.float32, 2, group, "channels", "asymmetric")
    check(device, dim, torch.bfloat16, 4, 8, "tokens", "symmetric")


@pytest.mark.parametrize(("dim", "group"), [(64, 64), (128, 32), (80, 80)])
def test_float8(device: torch.device, dim: int, group: int) -> None:
    check(device, dim, torch.float32, 8, group, "channels", "float8")


def test_refusals(device: torch.device) -> None:
    from kvfoundry.kernels.encode_rows import fused

    rows = torch.randn(1, 1, 24, 64, device=device)
    at = torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(KVFoundryError, match="no whole number of groups"):
        fused.encode(rows, buffers(rows, 4, 16, "tokens", "asymmetric"), at)
    with pytest.raises(KVFoundryError, match="power of two"):
        fused.encode(rows, buffers(rows, 4, 24, "channels", "asymmetric"), at)
    with pytest.raises(KVFoundryError, match="got 3"):
        fused.encode(rows, replace(buffers(rows, 4, 16, "channels", "asymmetric"), bits=3), at)
