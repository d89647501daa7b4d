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
from kvfoundry.layer import CacheLayer
from kvfoundry.layouts import CodedRows, side
from kvfoundry.method import Method
from kvfoundry.prompt import Prompt
from kvfoundry.prompt_mask import PromptMask


@pytest.mark.parametrize("shared", [False, True])
def test_gather_into_rectangles_and_stretches(shared: bool, device: torch.device) -> None:
    from kvfoundry.kernels.gather_rows import fused

    keys = torch.randn(2, 2, 60, 80, device=device).bfloat16()[:, :, :50]
    values = torch.randn(2, 2, 50, 64, device=device).bfloat16()
    positions = torch.randperm(50, device=device).to(torch.int16).expand(2, 1 if shared else 2, 50).contiguous()
    keep = torch.rand(2, 2, 50, device=device) < 0.5
    keep[0, 1] = False
    counts = keep.sum(dim=-1).cpu()
    beyond = torch.arange(50, device=device).where(keep, 50).sort(dim=-1).values[..., : int(counts.max())]
    slots = beyond.masked_fill(beyond == 50, -1)
    rows = gathering.Rows(keys, values, positions)
    for found, expected in (
        (fused.rectangle(rows, slots), gathering.rectangle(rows, slots)),
        (fused.stretches(rows, slots, counts), gathering.stretches(rows, slots, counts)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    flat = gathering.stretches(rows, slots, counts)
    assert torch.equal(flat.keys, keys[keep]) and torch.equal(flat.values, values[keep])
    rectangle = gathering.rectangle(rows, slots)
    assert (rectangle.positions == -1).sum() == (slots == -1).sum() and not rectangle.keys[0, 1].any()


@pytest.mark.parametrize("spec", ["snapkv(budget=12, window=4)", "adakv(budget=12, window=4)"])
def test_an_eviction_is_moved_by_the_kernel(spec: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfoundry.kernels import gather_rows
    from kvfoundry.kernels.gather_rows import fused

    keys, values = (torch.randn(2, 2, 60, 32, device=device) for _ in range(2))
    calls: list[int] = []
    once = fused._launched

    def counted(*arguments: Any) -> gathering.Rows:
        calls.append(1)
        return once(*arguments)

    monkeypatch.setattr(fused, "_launched", counted)
    results = []
    for reason in ("not here", None):
        monkeypatch.setattr(gather_rows, "without_triton", lambda _, reason=reason: reason)
        layer = CacheLayer(Method.parse(spec), prompt=Prompt(60))
        layer.step(keys, keys, values)
        assert layer.rows is not None and int(layer.rows.lengths.float().mean()) == 12
        results.append(list(layer.rows.tensors()))
    assert len(calls) == 1
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
    at = torch.tensor([[0, 16], [32, -1]], dtype=torch.int32, device=device)
    ours, theirs = (buffers(rows, bits, group, along, mode) for _ in range(2))
    fused.encode(rows, ours, at)
    encoding.encode(rows, theirs, at)
    assert theirs.codes.any() and not theirs.codes[1, 1].any()
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


@pytest.mark.parametrize("spec", ["kivi(bits=2, residual=8, group=16)", "fp8(residual=0)", "int4(residual=4, group=8)"])
def test_a_prompt_is_written_down_by_the_kernel(
    spec: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that are equally far, and a batch whose rows are not, in two calls and in pieces: the same bits."""
    from kvfoundry.kernels import encode_rows
    from kvfoundry.kernels.encode_rows import fused

    monkeypatch.setattr(side, "_ENCODED_AT_ONCE", 64)
    monkeypatch.setattr(side, "_GPU_BLOCKS", 1)
    keys, values = (torch.randn(2, 2, 60, 32, device=device).bfloat16() for _ in range(2))
    calls: list[int] = []
    once = fused.encode

    def counted(*arguments: Any) -> None:
        calls.append(1)
        once(*arguments)

    monkeypatch.setattr(fused, "encode", counted)
    for uneven in (False, True):
        mask = torch.ones(2, 60, device=device)
        mask[1, :7] = 0 if uneven else 1
        results = []
        for reason in ("not here", None):
            monkeypatch.setattr(encode_rows, "without_triton", lambda _, reason=reason: reason)
            calls.clear()
            layer = CacheLayer(Method.parse(spec))
            for part in (slice(0, 50), slice(50, 60)):
                layer.update(keys[:, :, part], values[:, :, part])
                layer.attend(keys[:, :, part], PromptMask(attention_mask=mask[:, : part.stop].bool()))
            assert isinstance(layer.rows, CodedRows)
            assert bool(calls) == (reason is None)
            results.append(list(layer.rows.tensors()))
        assert len(results[0]) == len(results[1]) and any(part.dtype == torch.uint8 for part in results[0])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
