"""The kernel over codes of two bits, lane by lane: as its reference where it is taken, and taken where it should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from near import assert_near
from test_coded_decode import per_channel, per_token

from kvfoundry.kernels.coded_decode import Codes, naive

DTYPE = torch.bfloat16
HEADS, DIM = 2, 128

Writer = Callable[[torch.Tensor], Codes]


def keys_of(rows: torch.Tensor, group: int = 32) -> Codes:
    return per_channel(rows, 2, group)


def values_of(rows: torch.Tensor) -> Codes:
    return per_token(rows, 2)


def tensors(
    device: torch.device,
    *,
    capacity: int = 64,
    coded: Any = ((64, 32),),
    tails: Any = ((5, 1),),
    group: int = 4,
    keys: Writer = keys_of,
    values: Writer = values_of,
    asked: float = 3.0,
    steady: bool = False,
    room: int = 24,
) -> tuple[Any, ...]:
    count, tail = (torch.tensor(number, dtype=torch.int32, device=device) for number in (coded, tails))
    batch = count.shape[0]
    query = torch.randn(batch, HEADS * group, 1, DIM, device=device, dtype=DTYPE) * asked
    rows = [torch.randn(batch, HEADS, capacity, DIM, device=device, dtype=DTYPE) for _ in range(2)]
    newest = [torch.randn(batch, HEADS, room, DIM, device=device, dtype=DTYPE) for _ in range(2)]
    for tensor in newest:
        tensor[torch.arange(room, device=device) >= tail[..., None]] = float("nan")
    return (query.abs() if steady else query), keys(rows[0]), values(rows[1]), count, *newest, tail


def check(device: torch.device, arguments: tuple[Any, ...], programs: int = 1, **terms: Any) -> None:
    """programs: for each multiprocessor of a GPU; in the interpreter there are four of those."""
    from kvfoundry.kernels.coded_decode import fused, two_bits

    assert two_bits.reads(*arguments[:3], None)
    tuning = two_bits.DEFAULT if device.type == "cuda" else replace(two_bits.DEFAULT, programs=programs)
    expected = naive.attend(*arguments, scaling=0.1, return_lse=True, **terms)
    found = fused.attend(*arguments, scaling=0.1, return_lse=True, tuning=tuning, **terms)
    assert_near(found[0], expected[0], DTYPE)
    assert_near(found[1], expected[1], DTYPE)


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_query_heads(device: torch.device, group: int) -> None:
    check(device, tensors(device, group=group))


def test_heads_of_different_lengths_in_a_batch(device: torch.device) -> None:
    check(device, tensors(device, coded=((64, 0), (7, 33)), tails=((0, 1), (20, 3))))


def test_more_groups_than_are_looked_up_together(device: torch.device) -> None:
    """Nine groups and a part of a tenth in one program, minima of eight in one product."""
    check(device, tensors(device, capacity=320, coded=((301, 40),)), programs=1)


def test_groups_of_keys_longer_than_a_tile(device: torch.device) -> None:
    check(device, tensors(device, capacity=192, coded=((192, 130),), keys=lambda rows: keys_of(rows, 64)))


def test_newest_rows_with_a_query_of_their_own(device: torch.device) -> None:
    """Newest rows are not rotated, codes are: each has its query."""
    arguments = tensors(device)
    check(device, arguments, tail_query=torch.randn_like(arguments[0]))


def test_sinks(device: torch.device) -> None:
    check(device, tensors(device), sinks=torch.randn(HEADS * 4, device=device, dtype=DTYPE))


@pytest.mark.parametrize("falling", [False, True])
def test_peaks_that_come_late(device: torch.device, falling: bool) -> None:
    """Weights that grow by far more than numbers can hold, or fall as far below the first."""
    growing = torch.linspace(-6, 6, 160, device=device)[:, None]
    growing = (-growing if falling else growing).to(DTYPE)
    check(
        device,
        tensors(
            device,
            capacity=160,
            coded=((160, 100),),
            keys=lambda rows: keys_of(rows.abs() * growing),
            steady=True,
            asked=1.0,
        ),
    )


@pytest.mark.parametrize("size", [2.0**-30, 2.0**30])
def test_numbers_far_from_one(device: torch.device, size: float) -> None:
    check(
        device,
        tensors(
            device, keys=lambda rows: keys_of(rows * size), values=lambda rows: values_of(rows * size),
            tails=((0, 0),), asked=1 / size,
        ),
    )  # fmt: skip


def test_rows_behind_the_last_are_not_weighed(device: torch.device) -> None:
    """Codes and tables behind a head's rows hold anything, also what is no number."""
    arguments = tensors(device, capacity=96, coded=((40, 64),))
    values = arguments[2]
    for head, rows in ((0, 64), (1, 64)):
        for table in (values.scale, values.minimum):
            table[:, head, rows:] = float("nan")
    check(device, arguments)


def test_a_view_of_larger_buffers(device: torch.device) -> None:
    arguments = list(tensors(device, capacity=128))
    for number in (1, 2):
        side = arguments[number]
        cut = 2 if number == 1 else 64
        arguments[number] = replace(
            side, codes=side.codes[:, :, :64], scale=side.scale[:, :, :cut], minimum=side.minimum[:, :, :cut]
        )
    check(device, tuple(arguments))


def test_what_it_leaves_to_the_other_kernel(device: torch.device) -> None:
    from kvfoundry.kernels.coded_decode import two_bits

    query, keys, values = tensors(device)[:3]
    assert two_bits.reads(query, keys, values, None)
    assert not two_bits.reads(query, keys, values, 30.0)
    assert not two_bits.reads(query.half(), keys, values, None)
    assert not two_bits.reads(query.repeat(1, 2, 1, 1), keys, values, None)
    assert not two_bits.reads(query.expand(-1, -1, 2, -1), keys, values, None)
    rows = torch.randn(1, HEADS, 64, DIM, device=device, dtype=DTYPE)
    assert not two_bits.reads(query, per_channel(rows, 4, 32), values, None)
    assert not two_bits.reads(query, keys_of(rows, 16), values, None)
    assert not two_bits.reads(query, per_token(rows, 2), values, None)
    assert not two_bits.reads(query, keys, per_token(rows, 2, group=64), None)
    odd = replace(keys, codes=keys.codes[:, :, :48])
    assert not two_bits.reads(query, odd, values, None)
