"""Fused attention over codes equals its reference: any code and head size, codes and newest rows in any shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from near import assert_near

from kvfoundry.codecs.fp8 import Float8
from kvfoundry.codecs.groups import PerChannel, PerToken
from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.coded_decode import Codes, naive

HEADS = 2


def attend(device: torch.device, *arguments: Any, block: int = 16, **terms: Any) -> Any:
    from kvfoundry.kernels.coded_decode import fused

    tuning = fused.DEFAULT if device.type == "cuda" else replace(fused.DEFAULT, block=block, programs=1)
    return fused.attend(*arguments, tuning=tuning, **terms)


def coded_side(
    rows: torch.Tensor, codec: PerToken | PerChannel | Float8, along: Literal["channels", "tokens"]
) -> Codes:
    """All rows [batch, heads, capacity, dim] as the codec writes them, in preallocated buffers."""
    batch, heads, _, dim = rows.shape
    block = codec.block
    written = codec.encode(rows.reshape(-1, block, dim), torch.zeros(rows.shape[:3]), {})
    parts = {**written.rows, **written.tables}
    table = {name: part.reshape(batch, heads, -1, part.shape[-1]) for name, part in parts.items()}
    bits, mode = (8, "float8") if isinstance(codec, Float8) else (codec.bits, codec.mode)
    assert codec.group is not None
    return Codes(table["codes"], table["scale"], table.get("minimum"), bits, codec.group, along, mode, dim)  # type: ignore[arg-type]


def per_token(rows: torch.Tensor, bits: int, mode: Any = "asymmetric", group: int = 32) -> Codes:
    dim = rows.shape[3]
    return coded_side(rows, PerToken(bits, min(group, dim), mode, dim=dim), "channels")


def per_channel(rows: torch.Tensor, bits: int, group: int = 16, mode: Any = "asymmetric") -> Codes:
    return coded_side(rows, PerChannel(bits, group, mode, dim=rows.shape[3]), "tokens")


def check(
    device: torch.device,
    keys: Any,
    values: Any,
    *,
    dtype: torch.dtype = torch.float32,
    group: int = 2,
    queries: int = 1,
    dim: int = 64,
    coded: Any = ((48, 0), (16, 32)),
    tails: Any = ((5, 1), (0, 20)),
    block: int = 16,
    steady: bool = False,
    asked: float = 1.0,
    **terms: Any,
) -> None:
    """steady: queries without negative numbers; asked: their size."""
    count, tail = (torch.tensor(number, dtype=torch.int32, device=device) for number in (coded, tails))
    query = torch.randn(2, HEADS * group, queries, dim, device=device, dtype=dtype)
    query = (query.abs() if steady else query) * asked
    rows = [torch.randn(2, HEADS, 64, dim, device=device, dtype=dtype) for _ in range(2)]
    newest = [torch.randn(2, HEADS, 24, dim, device=device, dtype=dtype) for _ in range(2)]
    for tensor in newest:
        tensor[torch.arange(24, device=device) >= tail[..., None]] = float("nan")
    arguments = (query, keys(rows[0]), values(rows[1]), count, *newest, tail)
    expected = naive.attend(*arguments, scaling=0.1, return_lse=True, **terms)
    found = attend(device, *arguments, block=block, scaling=0.1, return_lse=True, **terms)
    assert_near(found[0], expected[0], dtype)
    assert_near(found[1], expected[1], dtype)


@pytest.mark.parametrize(
    ("bits", "dim"), [(1, 64), (2, 64), (4, 64), (8, 64), (2, 80), (4, 80), (1, 96), (2, 96), (4, 128), (8, 128)]
)
def test_keys_per_channel_values_per_token(device: torch.device, bits: int, dim: int) -> None:
    check(device, lambda rows: per_channel(rows, bits), lambda rows: per_token(rows, bits), dim=dim)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_groups_smaller_than_a_tile(device: torch.device, size: int) -> None:
    check(device, lambda rows: per_channel(rows, 4, size), lambda rows: per_token(rows, 4))
    check(device, lambda rows: per_token(rows, 4), lambda rows: per_channel(rows, 2, size), coded=((44, 0), (16, 32)))


@pytest.mark.parametrize("block", [32, 64])
def test_several_tiles_a_step(device: torch.device, block: int) -> None:
    """Steps that end within a head, and groups of tokens larger than a step."""
    check(device, lambda rows: per_channel(rows, 2), lambda rows: per_token(rows, 2), dim=128, block=block)
    check(device, lambda rows: per_channel(rows, 2, 64), lambda rows: per_token(rows, 2), dim=128, block=block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_dtypes(device: torch.device, dtype: torch.dtype, bits: int) -> None:
    keys, values = (lambda rows: per_channel(rows, bits)), (lambda rows: per_token(rows, bits))
    check(device, keys, values, dtype=dtype, group=4, dim=128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_peaks_that_come_late(device: torch.device, dtype: torch.dtype) -> None:
    """Logits that grow from row to row: far above what the weights so far were set against, and far below."""
    growing = torch.linspace(-6, 6, 64, device=device)[:, None]

    def keys(rows: torch.Tensor) -> Codes:
        return per_channel(rows.abs() * growing.to(rows.dtype), 4)

    check(device, keys, lambda rows: per_token(rows, 2), dtype=dtype, steady=True)


@pytest.mark.parametrize("size", [2.0**-30, 2.0**30])
def test_numbers_far_from_one(device: torch.device, size: float) -> None:
    """bfloat16 reaches far: scales of keys and values, and queries, of any size that products of float32 can hold."""
    keys, values = (lambda rows: per_channel(rows * size, 2)), (lambda rows: per_token(rows * size, 2))
    check(device, keys, values, dtype=torch.bfloat16, tails=((0, 0), (0, 0)), asked=1 / size)


@pytest.mark.parametrize(
    ("mode", "bits"), [("symmetric", 4), ("symmetric", 8), ("symmetric_full", 4), ("zero_point", 4), ("zero_point", 8)]
)
def test_modes(device: torch.device, mode: str, bits: int) -> None:
    check(device, lambda rows: per_token(rows, bits, mode, 64), lambda rows: per_channel(rows, bits, 32, mode))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8(device: torch.device, dtype: torch.dtype) -> None:
    def write(rows: torch.Tensor) -> Codes:
        return coded_side(rows, Float8(64, dim=64), "channels")

    check(device, write, write, dtype=dtype, group=3)


@pytest.mark.parametrize("group", [1, 8])
def test_several_queries_and_terms(device: torch.device, group: int) -> None:
    sinks = torch.randn(HEADS * group, device=device)
    rotated = torch.randn(2, HEADS * group, 3, 64, device=device)
    keys, values = (lambda rows: per_channel(rows, 2)), (lambda rows: per_token(rows, 4))
    check(device, keys, values, group=group, queries=3, sinks=sinks, softcap=5.0, tail_query=rotated)


def test_refusals(device: torch.device) -> None:
    rows = torch.randn(2, HEADS, 64, 64, device=device)
    values = per_token(rows, 4)
    count = torch.zeros(2, HEADS, dtype=torch.int32, device=device)
    with pytest.raises(KVFoundryError, match="1, 2, 4 and 8 bits, got 3"):
        attend(device, rows[:, :, :1], per_token(rows, 3), values, count, rows, rows, count, scaling=1.0)
    with pytest.raises(KVFoundryError, match="int32"):
        attend(device, rows[:, :, :1], values, values, count.long(), rows, rows, count, scaling=1.0)
