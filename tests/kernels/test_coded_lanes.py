"""The kernel over codes lane by lane: as its reference where it is taken, and taken where it should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from near import assert_near
from test_coded_decode import per_channel, per_token

from kvfoundry.kernels.coded_decode import Codes, naive

DTYPE = torch.bfloat16
HEADS, DIM = 2, 128

Writer = Callable[[torch.Tensor], Codes]


def keys_of(rows: torch.Tensor, group: int = 32, bits: int = 2) -> Codes:
    return per_channel(rows, bits, group)


def values_of(rows: torch.Tensor, bits: int = 2) -> Codes:
    return per_token(rows, bits)


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


def attend(device: torch.device, arguments: tuple[Any, ...], **terms: Any) -> Any:
    """By the kernel; few programs in the interpreter, so that each of them reads several tiles."""
    from kvfoundry.kernels.coded_decode import fused, lanes

    assert lanes.reads(*arguments[:3], None)
    tuning = lanes.DEFAULT if device.type == "cuda" else replace(lanes.DEFAULT, programs=1)
    return fused.attend(*arguments, scaling=0.1, tuning=tuning, **terms)


def check(device: torch.device, arguments: tuple[Any, ...], **terms: Any) -> None:
    expected = naive.attend(*arguments, scaling=0.1, return_lse=True, **terms)
    found = attend(device, arguments, return_lse=True, **terms)
    assert_near(found[0], expected[0], DTYPE)
    assert_near(found[1], expected[1], DTYPE)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_query_heads(device: torch.device, group: int, bits: int) -> None:
    check(device, tensors(device, group=group, keys=partial(keys_of, bits=bits), values=partial(values_of, bits=bits)))


def test_heads_of_different_lengths_in_a_batch(device: torch.device) -> None:
    check(device, tensors(device, coded=((64, 0), (7, 33)), tails=((0, 1), (20, 3))))


@pytest.mark.parametrize("bits", [2, 4])
def test_more_groups_than_are_looked_up_together(device: torch.device, bits: int) -> None:
    """Nine groups and a part of a tenth in one program, minima of eight in one product."""
    keys, values = partial(keys_of, bits=bits), partial(values_of, bits=bits)
    check(device, tensors(device, capacity=320, coded=((301, 40),), keys=keys, values=values))


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


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("size", [2.0**-30, 2.0**30])
def test_numbers_far_from_one(device: torch.device, size: float, bits: int) -> None:
    check(
        device,
        tensors(
            device, keys=lambda rows: keys_of(rows * size, bits=bits), tails=((0, 0),), asked=1 / size,
            values=lambda rows: values_of(rows * size, bits),
        ),
    )  # fmt: skip


def test_rows_behind_the_last_are_not_weighed(device: torch.device) -> None:
    """Codes and tables behind a head's rows hold anything, also what is no number."""
    arguments = tensors(device, capacity=96, coded=((40, 64),))
    expected = naive.attend(*arguments, scaling=0.1)
    for head, rows in ((0, 40), (1, 64)):
        for table in (arguments[2].scale, arguments[2].minimum):
            table[:, head, rows:] = float("nan")
    assert_near(attend(device, arguments), expected, DTYPE)


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
    from kvfoundry.kernels.coded_decode import lanes

    query, keys, values = tensors(device)[:3]
    assert lanes.reads(query, keys, values, None)
    assert not lanes.reads(query, keys, values, 30.0)
    assert not lanes.reads(query.half(), keys, values, None)
    assert not lanes.reads(query.repeat(1, 2, 1, 1), keys, values, None)
    assert not lanes.reads(query.expand(-1, -1, 2, -1), keys, values, None)
    rows = torch.randn(1, HEADS, 64, DIM, device=device, dtype=DTYPE)
    assert not lanes.reads(query, keys_of(rows, bits=4), values, None)
    assert not lanes.reads(query, keys_of(rows, bits=1), values_of(rows, 1), None)
    assert not lanes.reads(query, keys_of(rows, 16), values, None)
    assert not lanes.reads(query, per_token(rows, 2), values, None)
    assert not lanes.reads(query, keys, per_token(rows, 2, group=64), None)
    odd = replace(keys, codes=keys.codes[:, :, :48])
    assert not lanes.reads(query, odd, values, None)
