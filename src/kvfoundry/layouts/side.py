"""Keys or values of one layer as a codec writes them: first rows whole, codes, newest rows whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from kvfoundry.codecs.base import Codec, Encoded, Parts
from kvfoundry.codecs.rotation import Rotation
from kvfoundry.codecs.sparse import SparseRows
from kvfoundry.kernels.gather_rows.naive import picked
from kvfoundry.layouts.base import owned
from kvfoundry.layouts.rectangles import appended, cut, span

# Rows that are encoded at once: the temporaries of a long prompt stay small.
_ENCODED_AT_ONCE = 1 << 14
# A GPU has room for more at once.
_GPU_BLOCKS = 8
# Rows that are decoded at once where each needs the tables of its block picked for it.
_ROWS_WITH_TABLES = 64


@dataclass(frozen=True)
class CodedSide:
    """Rows 0 to firsts, then `counts` coded ones, then the tail, of every head. Frozen: operations give a new side.

    first: [batch, heads, width, dim]; tail: the same; firsts, counts, tails: [batch, heads] on the CPU.
    rows: name -> [slots, ...], the coded rows head after head; no slot is spare, so bytes follow from the rows alone.
    tables: name -> [blocks, ...] head after head; blocks: [batch, heads] of each head, on the CPU.
    block_of: [slots] block of every row, counted within its head; None while all blocks are whole.
    fixed: name -> [batch, heads, ...].
    sparse: name -> a few numbers of every slot.
    """

    codec: Codec
    rotation: Rotation | None
    first: Tensor
    tail: Tensor
    firsts: Tensor
    counts: Tensor
    tails: Tensor
    blocks: Tensor
    rows: Parts = field(default_factory=dict)
    tables: Parts = field(default_factory=dict)
    fixed: Parts = field(default_factory=dict)
    block_of: Tensor | None = None
    sparse: dict[str, SparseRows] = field(default_factory=dict)

    @classmethod
    def of(cls, codec: Codec, rotation: Rotation | None, rows: Tensor, lengths: Tensor, fixed: Parts) -> CodedSide:
        """All rows [batch, heads, rows, dim] waiting in the tail; `flushed` encodes what is due."""
        none = torch.zeros_like(lengths)
        return cls(codec, rotation, rows[:, :, :0].clone(), rows, none, none, lengths, none, fixed=fixed)

    @property
    def heads(self) -> int:
        """Stored heads of all batch rows together."""
        return self.counts.numel()

    @cached_property
    def _starts(self) -> Tensor:
        """[batch, heads] slot of the first coded row."""
        return (self.counts.flatten().cumsum(0) - self.counts.flatten()).view_as(self.counts)

    @cached_property
    def _block_starts(self) -> Tensor:
        return (self.blocks.flatten().cumsum(0) - self.blocks.flatten()).view_as(self.blocks)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that holds memory."""
        yield from (self.first, self.tail, *self.rows.values(), *self.tables.values(), *self.fixed.values())
        for part in self.sparse.values():
            yield from part.tensors()
        if self.block_of is not None:
            yield self.block_of

    # Growing.

    def appended(self, new: Tensor, added: Tensor) -> CodedSide:
        """New rows [batch, heads, tokens, dim] behind the tail, `added` [batch, heads] of them."""
        return replace(self, tail=appended(self.tail, self.tails, new, added), tails=self.tails + added)

    def flushed(self, positions: Tensor) -> CodedSide:
        """Encode what is due. positions: [batch, heads or 1, rows] of all rows."""
        side = self._with_first()
        codec, stride = self.codec, self.codec.stride
        due = (side.tails - codec.residual).clamp(min=0) // stride * stride
        if not bool(due.any()):
            return side
        at_once = _ENCODED_AT_ONCE * (_GPU_BLOCKS if side.tail.is_cuda else 1) // codec.block * codec.block
        pieces = [
            codec.encode(rows if self.rotation is None else self.rotation.turn(rows), where, fixed)
            for rows, where, fixed in side._due_blocks(due, positions, max(codec.block, at_once))
        ]
        return side._with_blocks(_joined(pieces), due)

    def _due_blocks(self, due: Tensor, positions: Tensor, at_once: int) -> Iterator[tuple[Tensor, Tensor, Parts]]:
        """The tail's first `due` rows as `Codec.encode` takes them, head after head, `at_once` rows a piece."""
        first = self.firsts + self.counts
        most, begin = int(due.max()), int(first.flatten()[0])
        if bool((due == most).all()) and bool((first == begin).all()):
            yield from self._even_blocks(begin, most, positions, at_once)
            return
        block, device = self.codec.block, self.tail.device
        owner = torch.arange(self.heads).repeat_interleave(due.flatten() // block)
        before = (due.flatten().cumsum(0) - due.flatten()) // block
        within = (torch.arange(owner.numel()) - before[owner])[:, None] * block + torch.arange(block)
        at_position = first.flatten()[owner][:, None] + within
        batch, head = torch.div(owner, due.shape[1], rounding_mode="floor"), owner % due.shape[1]
        batch, head, within, at_position = (tensor.to(device) for tensor in (batch, head, within, at_position))
        own_positions = head if positions.shape[1] > 1 else torch.zeros_like(head)
        step = at_once // block
        for start in range(0, batch.numel(), step):
            part = slice(start, start + step)
            b, h = batch[part, None], head[part, None]
            fixed = {name: tensor[b, h] for name, tensor in self.fixed.items()}
            yield self.tail[b, h, within[part]], positions[b, own_positions[part, None], at_position[part]], fixed

    def _even_blocks(
        self, begin: int, due: int, positions: Tensor, at_once: int
    ) -> Iterator[tuple[Tensor, Tensor, Parts]]:
        """`_due_blocks` of heads that are equally far: slices, of some whole heads or of a part of one.

        begin: rows of every head in front of its tail.
        """
        block, heads = self.codec.block, max(1, at_once // due)
        rows = self.tail.flatten(0, 1)
        where = positions[:, :, begin : begin + due].expand(*self.counts.shape, -1).flatten(0, 1)
        for start in range(0, self.heads, heads):
            own = slice(start, start + heads)
            fixed = {name: tensor.flatten(0, 1)[own] for name, tensor in self.fixed.items()}
            for row in range(0, due, at_once):
                part = slice(row, min(row + at_once, due))
                at = where[own, part].unflatten(1, (-1, block)).flatten(0, 1)
                each = at.shape[0] // len(rows[own])
                yield (
                    rows[own, part].unflatten(1, (-1, block)).flatten(0, 1),
                    at,
                    {name: tensor.repeat_interleave(each, dim=0)[:, None] for name, tensor in fixed.items()},
                )

    def _with_first(self) -> CodedSide:
        """Move rows from the tail to the front where the front is not full and nothing is coded yet."""
        moved = torch.minimum(self.tails, self.codec.first - self.firsts).clamp(min=0) * (self.counts == 0)
        if not bool(moved.any()):
            return self
        return replace(
            self,
            first=appended(self.first, self.firsts, cut(self.tail, torch.zeros_like(moved), moved), moved),
            tail=cut(self.tail, moved, self.tails - moved),
            firsts=self.firsts + moved,
            tails=self.tails - moved,
        )

    def _with_blocks(self, encoded: Encoded, added: Tensor) -> CodedSide:
        block = self.codec.block
        new_rows = {name: owned(tensor.flatten(0, 1)) for name, tensor in encoded.rows.items()}
        new_tables = {name: owned(tensor) for name, tensor in encoded.tables.items()}
        new_blocks = added // block if encoded.tables else torch.zeros_like(added)
        block_of = self.block_of
        if block_of is not None:
            owner = torch.arange(self.heads).repeat_interleave(added.flatten())
            number = torch.arange(owner.numel()) - (added.flatten().cumsum(0) - added.flatten())[owner]
            fresh = self.blocks.flatten()[owner] + number // block
            dtype = torch.int16 if int((self.blocks + new_blocks).max()) <= 0x7FFF else torch.int32
            joined = {"": block_of.to(dtype)}, {"": fresh.to(block_of.device, dtype)}
            block_of = _interleaved(*joined, self.counts, added)[""]
        return replace(
            self,
            rows=_interleaved(self.rows, new_rows, self.counts, added),
            sparse=_interleaved_sparse(self.sparse, encoded.sparse, self.counts, added),
            tables=_interleaved(self.tables, new_tables, self.blocks, new_blocks),
            block_of=block_of,
            counts=self.counts + added,
            blocks=self.blocks + new_blocks,
            tail=cut(self.tail, added, self.tails - added),
            tails=self.tails - added,
        )

    # Shrinking and reordering.

    def kept(self, slots: Tensor) -> CodedSide:
        """The rows `slots` of every head: [batch, heads, width] ascending row numbers on the CPU, -1 behind them."""
        present = slots >= 0
        coded_from, tail_from = self.firsts[..., None], (self.firsts + self.counts)[..., None]
        in_first, in_tail = present & (slots < coded_from), present & (slots >= tail_from)
        coded = present & ~in_first & ~in_tail
        firsts, counts, tails = (mask.sum(dim=-1) for mask in (in_first, coded, in_tail))
        from_first = slots[:, :, : int(firsts.max())].masked_fill(~in_first[:, :, : int(firsts.max())], -1)
        behind = span(firsts + counts, tails)
        from_tail = (slots.gather(2, behind.clamp(min=0)) - tail_from).masked_fill(behind < 0, -1)
        batch, head, at = coded.nonzero(as_tuple=True)
        source = slots[batch, head, at] - self.firsts[batch, head]
        owner = batch * self.counts.shape[1] + head
        device = self.tail.device
        side = replace(
            self,
            first=picked(self.first, from_first.to(device)),
            tail=picked(self.tail, from_tail.to(device)),
            firsts=firsts,
            tails=tails,
        )
        return side._with_coded(owner, owner, source, counts)

    def rearranged(self, source: Tensor) -> CodedSide:
        """Heads [batch, heads] picked by their flat number among the present ones, on the CPU; repeats allowed."""

        def pick(rectangle: Tensor) -> Tensor:
            return rectangle.flatten(0, 1)[source.to(rectangle.device)]

        counts = self.counts.flatten()[source]
        owner = torch.arange(source.numel()).repeat_interleave(counts.flatten())
        number = torch.arange(owner.numel()) - (counts.flatten().cumsum(0) - counts.flatten())[owner]
        tails, firsts = self.tails.flatten()[source], self.firsts.flatten()[source]
        none = torch.zeros_like(tails)
        side = replace(
            self,
            first=cut(pick(self.first), none, firsts),
            tail=cut(pick(self.tail), none, tails),
            firsts=firsts,
            tails=tails,
            fixed={name: pick(tensor) for name, tensor in self.fixed.items()},
        )
        return side._with_coded(owner, source.flatten()[owner], number, counts)

    def _with_coded(self, owner: Tensor, source: Tensor, number: Tensor, counts: Tensor) -> CodedSide:
        """Coded row `number` of the present head `source` for every row of the new heads `owner`, ascending.

        Tables to which no row refers any more are dropped. `counts` has the shape of the new heads.
        """
        block, device = self.codec.block, self.tail.device
        if owner.numel() == self.counts.sum() and torch.equal(owner, source) and counts.shape == self.counts.shape:
            return replace(self, counts=counts)  # all coded rows stay where they are
        slots = (self._starts.flatten()[source] + number).to(device)
        rows = {name: tensor[slots] for name, tensor in self.rows.items()}
        sparse = {name: part.rows(slots) for name, part in self.sparse.items()}
        if not self.tables:
            return replace(self, rows=rows, sparse=sparse, counts=counts, blocks=torch.zeros_like(counts))
        local = number // block if self.block_of is None else self.block_of[slots].cpu().long()
        blocks_before = int(self.blocks.sum())
        used, refers = torch.unique(
            owner * blocks_before + self._block_starts.flatten()[source] + local, return_inverse=True
        )
        blocks = torch.bincount(used // blocks_before, minlength=counts.numel()).view_as(counts)
        starts = blocks.flatten().cumsum(0) - blocks.flatten()
        local = refers - starts[owner]
        begins = counts.flatten().cumsum(0) - counts.flatten()
        whole = torch.equal(local, (torch.arange(owner.numel()) - begins[owner]) // block) and bool(
            (counts % block == 0).all()
        )
        dtype = torch.int16 if local.numel() == 0 or int(local.max()) < 0x7FFF else torch.int32
        return replace(
            self,
            rows=rows,
            sparse=sparse,
            tables={name: tensor[(used % blocks_before).to(device)] for name, tensor in self.tables.items()},
            block_of=None if whole else local.to(device, dtype),
            counts=counts,
            blocks=blocks,
        )

    # Reading.

    def tile(self, start: int, stop: int, dtype: torch.dtype, positions: Tensor, *, turned: bool = False) -> Tensor:
        """Rows start to stop of every head; see `kernels.coded_attention.RowSource`."""
        index = torch.arange(start, stop, device=self.tail.device).expand(*self.counts.shape, -1)
        # The common case at a glance: no first rows, and whole blocks of every head.
        block = self.codec.block
        plain = self.block_of is None and not bool(self.firsts.any()) and int(self.counts.min()) >= stop
        if plain and start % block == 0 and stop % block == 0:
            return self._back(self._whole_blocks(start, stop, dtype, positions), turned)
        if not self.tables:
            return self.at(index, dtype, positions, turned=turned)
        # Tables are picked for every row here, so fewer rows at a time keep them as small as a tile.
        step = _ROWS_WITH_TABLES
        pieces = [
            self.at(index[:, :, i : i + step], dtype, positions[:, :, i : i + step], turned=turned)
            for i in range(0, max(1, stop - start), step)
        ]
        return torch.cat(pieces, dim=2)

    def at(self, index: Tensor, dtype: torch.dtype, positions: Tensor, *, turned: bool = False) -> Tensor:
        """Rows `index` [batch, heads, n] of every head, decoded: [batch, heads, n, dim]; finite where there is none."""
        device = self.tail.device
        firsts, counts = self.firsts.to(device)[..., None], self.counts.to(device)[..., None]
        coded = (index >= firsts) & (index < firsts + counts)
        tail = index - firsts - counts
        forth = self.rotation is not None and turned
        result = picked(self.tail, tail.clamp(max=self.tail.shape[2] - 1).masked_fill(tail < 0, -1)).to(dtype)
        if self.first.shape[2]:
            front = picked(self.first, index.clamp(max=self.first.shape[2] - 1)).to(dtype)
            result = torch.where((index < firsts)[..., None], front, result)
        if forth:
            assert self.rotation is not None
            result = self.rotation.turn(result)
        if bool(coded.any()):
            slots = (self._starts.to(device)[..., None] + index - firsts).clamp(min=0)
            slots = slots.where(coded, 0)
            decoded = self._back(self._decoded(slots, index - firsts, coded, dtype, positions), turned)
            result = torch.where(coded[..., None], decoded, result)
        return result

    def _back(self, rows: Tensor, turned: bool) -> Tensor:
        return rows if self.rotation is None or turned else self.rotation.turn_back(rows)

    def _entries(self, slots: Tensor) -> Parts:
        """Row entries of the slots; sparse parts as rectangles."""
        rows = {name: tensor[slots] for name, tensor in self.rows.items()}
        for name, part in self.sparse.items():
            rows[f"{name}.values"], rows[f"{name}.columns"] = part.padded(slots, self.tail.shape[3])
        return rows

    def _decoded(self, slots: Tensor, number: Tensor, coded: Tensor, dtype: torch.dtype, positions: Tensor) -> Tensor:
        rows = self._entries(slots)
        tables: Parts = {}
        if self.tables:
            local = number // self.codec.block if self.block_of is None else self.block_of[slots].long()
            at = (self._block_starts.to(slots.device)[..., None] + local).where(coded, 0)
            tables = {name: tensor[at] for name, tensor in self.tables.items()}
        fixed = {name: tensor[:, :, None] for name, tensor in self.fixed.items()}
        return self.codec.decode(rows, tables, fixed, positions.expand_as(slots), dtype)

    def _whole_blocks(self, start: int, stop: int, dtype: torch.dtype, positions: Tensor) -> Tensor:
        block, device = self.codec.block, self.tail.device
        first, first_block = (part.to(device, non_blocking=True) for part in (self._starts, self._block_starts))
        slots = first[..., None] + torch.arange(start, stop, device=device)
        rows = {name: tensor.unflatten(2, (-1, block)) for name, tensor in self._entries(slots).items()}
        at = first_block[..., None] + torch.arange(start // block, stop // block, device=device)
        tables = {name: tensor[at][:, :, :, None] for name, tensor in self.tables.items()}
        fixed = {name: tensor[:, :, None, None] for name, tensor in self.fixed.items()}
        where = positions.expand(*self.counts.shape, -1).unflatten(2, (-1, block))
        return self.codec.decode(rows, tables, fixed, where, dtype).flatten(2, 3)


def _joined(pieces: list[Encoded]) -> Encoded:
    if len(pieces) == 1:
        return pieces[0]
    rows = {name: torch.cat([piece.rows[name] for piece in pieces]) for name in pieces[0].rows}
    tables = {name: torch.cat([piece.tables[name] for piece in pieces]) for name in pieces[0].tables}
    sparse = {name: SparseRows.joined([piece.sparse[name] for piece in pieces]) for name in pieces[0].sparse}
    return Encoded(rows, tables, sparse)


def _interleaved(old: Parts, new: Parts, before: Tensor, added: Tensor) -> Parts:
    """Entries of every head, old ones first: `before` and `added` [batch, heads] of each, on the CPU."""
    if not old or not bool(before.any()):
        return new
    if not new:
        return old
    if all(bool((counts == counts.flatten()[0]).all()) for counts in (before, added)):

        def by_head(part: Tensor) -> Tensor:
            return part.unflatten(0, (before.numel(), -1))

        return {name: torch.cat([by_head(old[name]), by_head(new[name])], dim=1).flatten(0, 1) for name in new}
    order = _by_head(before, added)
    return {name: torch.cat([old[name], new[name]])[order.to(new[name].device)] for name in new}


def _interleaved_sparse(
    old: dict[str, SparseRows], new: dict[str, SparseRows], before: Tensor, added: Tensor
) -> dict[str, SparseRows]:
    if not old or not new:
        return new or old
    order = _by_head(before, added)
    parts = {name: SparseRows.joined([old[name], new[name]]) for name in new}
    return {name: part.rows(order.to(part.counts.device)) for name, part in parts.items()}


def _by_head(before: Tensor, added: Tensor) -> Tensor:
    """The order of all old entries, then all new ones, that puts those of a head together, old ones first."""
    number = torch.arange(before.numel())
    owner = torch.cat([number.repeat_interleave(before.flatten()), number.repeat_interleave(added.flatten())])
    return owner.argsort(stable=True)
