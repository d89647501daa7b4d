"""Codes in the engine: old rows in static buffers of codes, the newest whole in front of them, in rows that stay.

A step reads codes and whole rows in one pass and stores its row behind the whole ones. Rows are written down between
steps, at the interval that the codec states (its `stride`), outside the graph and as the codec does it: the codes are
bit for bit those of the plain path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvfoundry.codecs.base import Codec, KVCodec, Parts
from kvfoundry.codecs.groups import PerChannel
from kvfoundry.codecs.rotation import rotation_matrix
from kvfoundry.engine.rows import Plan, StaticRows
from kvfoundry.kernels.coded_decode import Codes
from kvfoundry.kernels.encode_rows import encode
from kvfoundry.layouts.base import Stretches
from kvfoundry.layouts.coded import CodedRows
from kvfoundry.layouts.kernel_codes import along_tokens, codes_of
from kvfoundry.layouts.side import CodedSide


def tail_plan(rows: CodedRows) -> Plan:
    """Slots for the whole rows: as many as wait at most."""
    codec = rows.codec.keys
    slots = torch.full_like(rows.lengths, codec.residual + codec.stride).int()
    return Plan(slots, torch.zeros_like(slots), False, True, codec.residual + codec.stride)


def tail_like(rows: CodedRows) -> Stretches:
    """What the whole rows are like."""
    keys, values = rows.keys.tail.flatten(0, 2), rows.values.tail.flatten(0, 2)
    return Stretches(keys, values, torch.zeros_like(rows.lengths), rows.keys.tails)


class Coded:
    """The codes of one layer, beside `tail`, its whole rows.

    keys, values: codes of all heads; count: int32 [batch, heads], rows in codes.
    """

    def __init__(self, rows: CodedRows, tail: StaticRows, new: int, room: int):
        self.codec, self.tail = rows.codec, tail
        self.capacity = self.needed(rows, new, room)
        shape = (*rows.lengths.shape, self.capacity)
        self.keys = _buffers(rows.codec.keys, rows.keys, shape)
        self.values = _buffers(rows.codec.values, rows.values, shape)
        self.count = torch.zeros(rows.lengths.shape, dtype=torch.int32, device=tail.keys.device)
        # as in `Rotation.turn`, but the matrix is where the queries are
        rotated = self.codec.rotation is not None
        self._turn = rotation_matrix(tail.keys.shape[1]).to(tail.keys.device) if rotated else None
        self._waiting = torch.zeros(rows.lengths.shape, dtype=torch.long)  # whole rows, as the host counts them

    @staticmethod
    def needed(rows: CodedRows, new: int, room: int) -> int:
        """Slots of a head for the codes that there are and those to come: whole groups of tokens."""
        group = math.lcm(rows.codec.keys.stride, *(side.group or 1 for side in _grouped(rows.codec)))
        unit = -(-room // group) * group
        return -(-(int(rows.lengths.max()) + new) // unit) * unit

    def fits(self, rows: CodedRows, new: int) -> bool:
        """Whether the codes of other rows can move in."""
        return (
            self.codec == rows.codec
            and self.count.shape == rows.lengths.shape
            and self.needed(rows, new, 1) <= self.capacity
        )

    def fill(self, rows: CodedRows) -> None:
        """Copy the codes and the whole rows of a layout in."""
        _copy(self.keys, rows.keys)
        _copy(self.values, rows.values)
        self.count.copy_(rows.keys.counts)
        tail, width = self.tail, rows.keys.tail.shape[2]
        self._waiting = rows.keys.tails.clone()
        tail.rectangle(tail.keys)[:, :, :width] = rows.keys.tail
        tail.rectangle(tail.values)[:, :, :width] = rows.values.tail
        tail.starts.copy_(torch.arange(tail.starts.numel()).view(tail.starts.shape) * tail.width)
        tail.capacities.fill_(tail.width)
        tail.lengths.copy_(self._waiting)
        tail.slots.copy_(self._waiting)

    def turned(self, query: Tensor) -> Tensor:
        """The query that reads codes: rotated as their keys were."""
        return query if self._turn is None else (query.float() @ self._turn).to(query.dtype)

    def attend(self, kernel: Any, query: Tensor, **terms: Any) -> Any:
        """Output [batch, query_heads, 1, value_dim] over codes and whole rows; query alike.

        kernel: one of `kernels.coded_decode`. terms: what it takes; with `return_lse` a pair comes back.
        """
        tail = self.tail
        return kernel.attend(
            self.turned(query), self.keys, self.values, self.count,
            tail.rectangle(tail.keys), tail.rectangle(tail.values), tail.lengths,
            tail_query=None if self._turn is None else query, **terms,
        )  # fmt: skip

    def after_step(self) -> None:
        """Write down what has waited long enough, between two steps."""
        stride = self.codec.keys.stride
        self._waiting += 1
        due = self._waiting >= self.codec.keys.residual + stride
        if not bool(due.any()):
            return
        self._waiting[due] -= stride
        # Mostly all heads are due at once: then nothing is carried to the device.
        tail, here = self.tail, None if bool(due.all()) else due.to(self.count.device, non_blocking=True)
        at = self.count if here is None else self.count.where(here, -1)
        for codes, flat in ((self.keys, tail.keys), (self.values, tail.values)):
            waiting = tail.rectangle(flat)
            oldest = waiting[:, :, :stride]
            if codes is self.keys and self.codec.rotation is not None:
                oldest = self.codec.rotation.turn(oldest)
            encode(oldest, codes, at)
            front, behind = waiting[:, :, :-stride], waiting[:, :, stride:]
            front.copy_(behind.clone() if here is None else torch.where(here[..., None, None], behind, front))
        written = stride if here is None else here * stride
        self.count += written
        tail.lengths -= written
        tail.slots.copy_(tail.lengths)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that holds memory."""
        yield self.count
        for side in (self.keys, self.values):
            yield from (side.codes, side.scale)
            if side.minimum is not None:
                yield side.minimum


def _grouped(codec: KVCodec) -> Iterator[PerChannel]:
    for side in (codec.keys, codec.values):
        if isinstance(side, PerChannel):
            yield side


def _buffers(codec: Codec, side: CodedSide, shape: tuple[int, ...]) -> Codes:
    *heads, capacity = shape
    # nothing may be written down yet, so the codec is asked what it would write
    blocks = side.tail.new_zeros(1, codec.block, side.tail.shape[3])
    written = codec.encode(blocks, torch.zeros(blocks.shape[:2], device=blocks.device), {})
    parts: Parts = written.tables if along_tokens(codec) else written.rows
    entries = capacity // codec.block

    def like(name: str) -> Tensor | None:
        part = parts.get(name)
        return None if part is None else part.new_zeros(*heads, entries, part.shape[-1])

    scale = like("scale")
    assert scale is not None
    codes = written.rows["codes"]
    return codes_of(codec, codes.new_zeros(*heads, capacity, codes.shape[-1]), scale, like("minimum"))


def _copy(codes: Codes, side: CodedSide) -> None:
    """The coded rows of a side, which lie head after head, to the front of every head's slots."""
    if not side.rows:
        return
    parts = side.tables if codes.along == "tokens" else side.rows
    block = codes.group if codes.along == "tokens" else 1
    for target, source, size in (
        (codes.codes, side.rows["codes"], 1),
        (codes.scale, parts["scale"], block),
        (codes.minimum, parts.get("minimum"), block),
    ):
        if target is None or source is None:
            continue
        start = 0
        for head, count in zip(target.flatten(0, 1), (side.counts.flatten() // size).tolist(), strict=True):
            head[:count] = source[start : start + count]
            start += count
