"""Codes and kept rows on a CUDA device: the kernels' bits are torch's, and the host is not waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

from kvfoundry.codecs.base import Site
from kvfoundry.codecs.groups import PerChannel, PerToken
from kvfoundry.kernels import encode_rows, gather_rows
from kvfoundry.kernels.gather_rows import Rows
from kvfoundry.layer import CacheLayer
from kvfoundry.layouts.side import CodedSide
from kvfoundry.method import Method
from kvfoundry.prompt import Prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROWS = 700


@contextmanager
def no_waiting() -> Iterator[None]:
    """An error where the host waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def stored(spec: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every tensor behind a layer after a prompt in two calls."""
    pytest.importorskip("triton")
    generator = torch.Generator("cuda").manual_seed(0)
    keys, values = (torch.randn(2, 4, ROWS, 128, generator=generator, device="cuda").to(dtype) for _ in range(2))
    layer = CacheLayer(Method.parse(spec), prompt=Prompt(ROWS))
    for part in (slice(0, 600), slice(600, ROWS)):
        layer.step(keys[:, :, part], keys[:, :, part], values[:, :, part])
    assert layer.rows is not None
    return list(layer.rows.tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("room", "spec"),
    [
        (encode_rows, "kivi(bits=2)"),
        (encode_rows, "kivi(bits=4, group=64)"),
        (encode_rows, "int8()"),
        (encode_rows, "fp8()"),
        (gather_rows, "snapkv(budget=0.1)"),
        (gather_rows, "adakv(budget=0.1)"),
    ],
    ids=lambda value: value.__name__.split(".")[-1] if isinstance(value, ModuleType) else value,
)
def test_the_kernel_writes_what_torch_writes(
    room: ModuleType, spec: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = stored(spec, dtype)
    monkeypatch.setattr(room, "without_triton", lambda _: "not here")
    theirs = stored(spec, dtype)
    assert len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "codec", [PerChannel(2, 32, waiting=128), PerToken(2, 32, waiting=128)], ids=lambda c: type(c).__name__
)
def test_nothing_is_asked_while_a_prompt_is_written_down(codec: PerChannel | PerToken) -> None:
    pytest.importorskip("triton")
    rows = torch.randn(1, 8, ROWS, 128, device="cuda").bfloat16()
    positions = torch.arange(ROWS, device="cuda")[None, None]
    side = CodedSide.of(codec.at(Site(0, 1, 128)), None, rows, torch.full((1, 8), ROWS), {})
    side.flushed(positions)  # the kernel is compiled
    with no_waiting():
        written = side.flushed(positions)
    assert int(written.counts.min()) == (ROWS - 128) // 32 * 32


def test_nothing_is_asked_while_uneven_heads_are_moved() -> None:
    pytest.importorskip("triton")
    keys, values = (torch.randn(1, 8, ROWS, 128, device="cuda") for _ in range(2))
    rows = Rows(keys, values, torch.arange(ROWS, device="cuda", dtype=torch.int16)[None, None])
    counts = torch.arange(8)[None] * 10 + 1
    number = torch.arange(int(counts.max()))
    slots = number.where(number < counts[..., None], -1).cuda()
    gather_rows.stretches(rows, slots, counts)  # the kernel is compiled
    with no_waiting():
        kept = gather_rows.stretches(rows, slots, counts)
    assert kept.keys.shape == (int(counts.sum()), 128)
    assert torch.equal(kept.positions[1:12].cpu(), torch.arange(11, dtype=torch.int16))
