"""Codes that live in host memory and cross the link packed; see `streamed.py` for rows as they are.

Whole rows (the newest, which wait to be written down, and the first ones of codecs that keep these) and the positions
of all rows stay on the device. Codes that are due are made there and moved.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvfoundry.codecs.base import Encoded, Parts
from kvfoundry.kernels.available import without_triton
from kvfoundry.kernels.coded_decode import Codes
from kvfoundry.layouts.base import Reading, Stretches
from kvfoundry.layouts.coded import CodedRows
from kvfoundry.layouts.host import HostPart, counted
from kvfoundry.layouts.kernel_codes import codec_refusal, coded_refusal, codes_of
from kvfoundry.layouts.rectangles import cut
from kvfoundry.layouts.ring import Ring, Rings, Shape
from kvfoundry.layouts.side import CodedSide
from kvfoundry.layouts.streamed import in_units

# Kinds of the parts of a side: entries of rows, entries of blocks, and the block of every row.
_ROWS, _TABLES, _BLOCK_OF = "rows", "tables", "block_of"
Part = tuple[str, str]


@dataclass(frozen=True)
class HostedSide(CodedSide):
    """A side whose codes and tables are on the host: `rows`, `tables` and `block_of` are empty here.

    hosted: (kind, name) -> entries of every head.
    """

    hosted: dict[Part, HostPart] = field(default_factory=dict)
    rings: Rings = field(default_factory=Rings)
    expected: int = 0

    @classmethod
    def moved(cls, side: CodedSide, rings: Rings, expected: int) -> HostedSide:
        """A side with what is coded of it moved to the host."""
        whole = ("codec", "rotation", "first", "tail", "firsts", "tails", "fixed")
        kept = {name: getattr(side, name) for name in whole}
        result = cls(**kept, counts=side.counts, blocks=side.blocks, rings=rings, expected=expected)
        result._move(side.rows, side.tables, side.block_of, side.counts, side.blocks)
        return result

    def _move(self, rows: Parts, tables: Parts, block_of: Tensor | None, counts: Tensor, blocks: Tensor) -> None:
        """Write entries that lie head after head, so many of each head, behind those on the host."""
        entries = [((_ROWS, name), part, counts) for name, part in rows.items()]
        entries += [((_TABLES, name), part, blocks) for name, part in tables.items()]
        entries += [] if block_of is None else [((_BLOCK_OF, ""), block_of.to(torch.int32), counts)]
        entries = [entry for entry in entries if len(entry[1])]
        shape = (self.counts.shape[0], self.counts.shape[1])
        with self.ring.receiving(*(part for _, part, _ in entries)):
            for name, part, of_heads in entries:
                hosted = self.hosted.setdefault(name, HostPart(self.tail.device, shape))
                expected = self.expected // self.codec.block if name[0] == _TABLES else self.expected
                hosted.append(part.detach().split(of_heads.flatten().tolist()), expected)

    @property
    def ring(self) -> Ring:
        """The ring of the device on which the rows are read."""
        return self.rings.on(self.tail.device)

    def _with_blocks(self, encoded: Encoded, added: Tensor) -> HostedSide:
        block, device = self.codec.block, self.tail.device
        new_blocks = added // block if encoded.tables else torch.zeros_like(added)
        block_of = None
        if (_BLOCK_OF, "") in self.hosted:
            number = [torch.arange(n) // block + b for n, b in zip(added.flatten(), self.blocks.flatten(), strict=True)]
            block_of = torch.cat(number).to(device)
        rows = {name: part.flatten(0, 1) for name, part in encoded.rows.items()}
        self._move(rows, encoded.tables, block_of, added, new_blocks)
        return replace(
            self,
            counts=self.counts + added,
            blocks=self.blocks + new_blocks,
            tail=cut(self.tail, added, self.tails - added),
            tails=self.tails - added,
        )

    def fetched(self) -> CodedSide:
        """The side with everything on the device."""
        self.ring.follow()
        own = {name: getattr(self, name) for name in CodedSide.__dataclass_fields__}
        parts: dict[str, Parts] = {_ROWS: {}, _TABLES: {}, _BLOCK_OF: {}}
        for (kind, name), part in self.hosted.items():
            parts[kind][name] = part.flat()
        return CodedSide(**own | {"rows": parts[_ROWS], "tables": parts[_TABLES], "block_of": parts[_BLOCK_OF].get("")})

    def of_heads(self, row: int, heads: slice, parts: dict[Part, Tensor]) -> CodedSide:
        """Some heads of a batch row as a side of their own. parts: their entries, [heads, room, ...] on the device."""
        one = slice(row, row + 1)
        counts, blocks = self.counts[one, heads], self.blocks[one, heads]
        flat: dict[str, Parts] = {_ROWS: {}, _TABLES: {}, _BLOCK_OF: {}}
        for (kind, name), part in parts.items():
            of_heads = (blocks if kind == _TABLES else counts).flatten().tolist()
            flat[kind][name] = torch.cat([lane[:n] for lane, n in zip(part, of_heads, strict=True)])
        firsts, tails = self.firsts[one, heads], self.tails[one, heads]
        return CodedSide(
            self.codec, self.rotation, self.first[one, heads], self.tail[one, heads], firsts, counts, tails, blocks,
            flat[_ROWS], flat[_TABLES], {name: part[one, heads] for name, part in self.fixed.items()},
            flat[_BLOCK_OF].get(""),
        )  # fmt: skip

    def shared(self) -> HostedSide:
        """A second side over the same memory."""
        return replace(self, hosted={name: part.shared() for name, part in self.hosted.items()})

    def tile(self, start: int, stop: int, dtype: torch.dtype, positions: Tensor, *, turned: bool = False) -> Tensor:
        return self.fetched().tile(start, stop, dtype, positions, turned=turned)

    def _decoded(self, slots: Tensor, number: Tensor, coded: Tensor, dtype: torch.dtype, positions: Tensor) -> Tensor:
        """Decode rows that are read where they are; `number` counts the coded rows of a head."""
        self.ring.follow()
        index = number.where(coded, -1)
        rows = {name: part.at(index) for (kind, name), part in self.hosted.items() if kind == _ROWS}
        block_of = self.hosted.get((_BLOCK_OF, ""))
        blocks = index // self.codec.block if block_of is None else block_of.at(index).long().where(coded, -1)
        tables = {name: part.at(blocks) for (kind, name), part in self.hosted.items() if kind == _TABLES}
        self.ring.lend(tensor for part in self.hosted.values() for tensor in part.tensors())
        self.ring.sent += sum(part.nbytes for part in (*rows.values(), *tables.values()))
        fixed = {name: tensor[:, :, None] for name, tensor in self.fixed.items()}
        return self.codec.decode(rows, tables, fixed, positions.expand_as(slots), dtype)


class StreamedCodes(CodedRows):
    """Rows of one layer under one codec, the codes on the host. Fields as of `StreamedRows`."""

    keys: HostedSide
    values: HostedSide
    group: int
    place: int
    version: object

    @classmethod
    def of(cls, codec_rows: CodedRows, group: int, rings: Rings, place: int, expected: int = 0) -> StreamedCodes:  # type: ignore[override]
        """Coded rows, moved to the host. expected: rows of a head that there will be, where that is known."""
        rows = object.__new__(cls)
        vars(rows).update(vars(codec_rows))
        rows.keys, rows.values = (
            HostedSide.moved(side, rings, expected) for side in (codec_rows.keys, codec_rows.values)
        )
        rows.group, rows.place = group, place
        rows.keys.ring.expect(rows)
        return rows._changed()

    def _changed(self) -> StreamedCodes:
        """What is on the host is another thing from now on."""
        self.version = object()
        self._units = in_units(self._lengths.shape, self.group)
        self._shapes: dict[int, list[Shape]] = {}
        return self

    @property
    def _hosted(self) -> list[tuple[int, Part, HostPart]]:
        """(side, name, entries) of everything on the host, in the order of the parts of a unit."""
        sides = (self.keys, self.values)
        return [(i, name, part) for i, side in enumerate(sides) for name, part in side.hosted.items()]

    @property
    def is_hosted(self) -> bool:
        """Whether anything has been written down yet, and so is on the host."""
        return bool(self._hosted)

    @property
    def is_apart(self) -> bool:
        """Whether rows are in groups of tokens that have lost some, which no kernel reads."""
        return any(kind == _BLOCK_OF for _, (kind, _), _ in self._hosted)

    # The units of the ring.

    @property
    def units(self) -> int:
        return len(self._units)

    def shapes(self, unit: int) -> list[Shape]:
        if unit not in self._shapes:
            row, heads = self._units[unit]
            self._shapes[unit] = [p.shape_of(heads, int(p.counts[row, heads].max())) for _, _, p in self._hosted]
        return self._shapes[unit]

    def fill(self, unit: int, parts: list[Tensor]) -> int:
        row, heads = self._units[unit]
        hosted = (part for _, _, part in self._hosted)
        return sum(part.copy_to(row, heads, target) for part, target in zip(hosted, parts, strict=True))

    # What stays on the host while newer rows are elsewhere.

    @property
    def ring(self) -> Ring:
        """The ring of the device on which the rows are read."""
        return self.keys.ring

    @property
    def stored(self) -> Tensor:
        """Rows of every head in codes on the host: [batch, heads], on the CPU."""
        return self.keys.counts

    @property
    def spans(self) -> list[tuple[int, slice]]:
        """The batch row and the heads of every unit."""
        return self._units

    @property
    def value_dim(self) -> int:
        """Channels of a value."""
        return self.values.tail.shape[3]

    @property
    def newest(self) -> CodedRows:
        """The rows that wait on the device, as coded rows without any code."""
        keys, values = (
            CodedSide(
                side.codec, side.rotation, side.first, side.tail, side.firsts, torch.zeros_like(side.counts),
                side.tails, torch.zeros_like(side.blocks), {}, {}, side.fixed, None,
            )
            for side in (self.keys, self.values)
        )  # fmt: skip
        waiting = self.keys.tails
        return CodedRows(self.codec, keys, values, self._positions[:, :, : int(waiting.max())], waiting, self._dtype)

    def codes_from(self, parts: list[Tensor]) -> tuple[Codes, Codes]:
        """Keys and values of a unit as kernels take them; parts: as `fill` has filled them."""
        sides: list[dict[str, Tensor]] = [{}, {}]
        for (number, (_, name), _), part in zip(self._hosted, parts, strict=True):
            sides[number][name] = part[None]
        keys, values = (
            codes_of(side.codec, found["codes"], found["scale"], found.get("minimum"))
            for side, found in zip((self.keys, self.values), sides, strict=True)
        )
        return keys, values

    def attend(self, query: Tensor, query_positions: Tensor, reading: Reading) -> Tensor:
        if not self.is_hosted:  # nothing is written down yet
            return self.fetched().attend(query, query_positions, reading)
        batch, query_heads, queries, _ = query.shape
        groups, ring = query_heads // self._lengths.shape[1], self.keys.ring
        kernel = self._kernel(query, reading)
        output = query.new_zeros(batch, query_heads, queries, self.values.tail.shape[3])
        ring.enter(self)
        for unit, (row, heads) in enumerate(self._units):
            asked, one = slice(heads.start * groups, heads.stop * groups), slice(row, row + 1)
            own = replace(reading, sinks=None if reading.sinks is None else reading.sinks[asked])
            with ring.taken(self, unit) as parts:
                read = self._read if kernel is None else self._read_by(kernel)
                output[one, asked] = read(row, heads, parts, query[one, asked], query_positions[one], own)
        return output

    def _read(
        self, row: int, heads: slice, parts: list[Tensor], query: Tensor, query_positions: Tensor, reading: Reading
    ) -> Tensor:
        """Decode tile by tile and attend, as coded rows on the device are read."""
        sides: list[dict[Part, Tensor]] = [{}, {}]
        for (number, name, _), part in zip(self._hosted, parts, strict=True):
            sides[number][name] = part
        one = slice(row, row + 1)
        rows = CodedRows(
            self.codec,
            self.keys.of_heads(row, heads, sides[0]),
            self.values.of_heads(row, heads, sides[1]),
            self._positions[one, slice(0, 1) if self._positions.shape[1] == 1 else heads],
            self._lengths[one, heads],
            self._dtype,
        )
        return rows.attend(query, query_positions, reading)

    def _kernel(self, query: Tensor, reading: Reading) -> Any:
        """The kernel that reads these codes, None where there is none."""
        if query.shape[2] > 1 or reading.unread_distance is not None or without_triton(query.device) is not None:
            return None
        refused = self.is_apart or codec_refusal(self.codec) is not None or coded_refusal(self) is not None
        return None if refused else _fused()

    def _read_by(self, kernel: Any) -> Any:
        """As `_read`, by one pass of a kernel of `coded_decode` over codes and whole rows."""

        def read(
            row: int, heads: slice, parts: list[Tensor], query: Tensor, query_positions: Tensor, reading: Reading
        ) -> Tensor:
            one = slice(row, row + 1)
            rotation = self.codec.rotation
            counts, tails = (
                counted(side[one, heads], query.device, torch.int32) for side in (self.keys.counts, self.keys.tails)
            )
            output: Tensor = kernel.attend(
                query if rotation is None else rotation.turn(query), *self.codes_from(parts), counts,
                self.keys.tail[one, heads], self.values.tail[one, heads], tails,
                tail_query=None if rotation is None else query,
                scaling=reading.scaling, softcap=reading.softcap, sinks=reading.sinks,
            )  # fmt: skip
            return output

        return read

    # Everything else is done by the layout that the device would hold.

    def flushed(self) -> StreamedCodes:
        before = self.keys.counts, self.values.counts
        rows = super().flushed()
        assert isinstance(rows, StreamedCodes)
        same = all(torch.equal(a, b) for a, b in zip(before, (rows.keys.counts, rows.values.counts), strict=True))
        return rows if same else rows._changed()

    def fetched(self) -> CodedRows:
        rows = CodedRows(
            self.codec, self.keys.fetched(), self.values.fetched(), self._positions, self._lengths, self._dtype
        )
        return rows.with_columns(dict(self._columns))

    def stretches(self) -> Stretches:
        self.keys.ring.follow()
        return super().stretches()

    def kept(self, view: Any, slots: Tensor, counts: Tensor) -> CodedRows:
        return self.fetched().kept(view, slots, counts)

    def truncated(self, lengths: Tensor) -> CodedRows:
        coded = torch.maximum(self.keys.firsts + self.keys.counts, self.values.firsts + self.values.counts)
        return self.fetched().truncated(lengths) if bool((lengths < coded).any()) else super().truncated(lengths)

    def select_batch(self, indices: Tensor) -> CodedRows:
        return self.fetched().select_batch(indices)

    def expanded_heads(self, groups: int) -> CodedRows:
        return self.fetched().expanded_heads(groups)

    def through(self, rings: Rings) -> StreamedCodes:
        """The same rows, read through these rings."""
        rows = self
        if self.keys.rings is not rings:
            rows = copy.copy(self)
            rows.keys, rows.values = replace(self.keys, rings=rings), replace(self.values, rings=rings)
        rows.keys.ring.expect(rows)
        return rows

    def shared(self) -> StreamedCodes:
        self.keys.ring.settle()
        twin = copy.copy(self)
        twin.keys, twin.values = self.keys.shared(), self.values.shared()
        return twin

    @property
    def hosted_nbytes(self) -> int:
        return sum(part.used_nbytes for _, _, part in self._hosted)

    def host_tensors(self) -> Iterator[Tensor]:
        for _, _, part in self._hosted:
            yield from part.tensors()


@cache
def _fused() -> Any:
    from kvfoundry.kernels.coded_decode import fused

    return fused
