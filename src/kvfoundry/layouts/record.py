"""The rows of one sequence in one layer as named tensors, and back, bit for bit: what can be stored or sent.

Every tensor of a record owns its storage. The batch dimension is gone; numbers per head are tensors too. Positions are
written relative to `start`, so a record says which token of its own passage a row is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvfoundry.codecs.base import KVCodec, RowsCodec
from kvfoundry.codecs.sparse import SparseRows
from kvfoundry.codecs.think import KeyChannels
from kvfoundry.errors import CacheStateError, DataError
from kvfoundry.layouts.base import Layout, RowsView, position_dtype
from kvfoundry.layouts.channel_pruned import ChannelPrunedRows
from kvfoundry.layouts.coded import CodedRows
from kvfoundry.layouts.dense import DenseRows
from kvfoundry.layouts.ragged import RaggedRows
from kvfoundry.layouts.side import CodedSide

Form = Literal["whole", "ragged", "coded", "pruned", "merged", "partner"]
_COUNTS = ("firsts", "counts", "tails", "blocks")


@dataclass(frozen=True, eq=False)
class Record:
    """form: how the rows are laid out; tensors: by name, on one device but for `lengths`.

    whole    keys, values [heads, rows, dim]; positions [heads or 1, rows], absent where row i is token i in all heads
    ragged   keys, values [slots, dim] and positions [slots], head after head; lengths [heads]
    coded    positions [heads or 1, rows], lengths [heads], and the parts of a `CodedSide` under `keys.` and `values.`
    pruned   `old.` and `tail.`, each whole or ragged, and channels [heads, kept]
    merged, partner: the two layers of a pair, see `merged_record`
    """

    form: Form
    tensors: dict[str, Tensor]

    @property
    def lengths(self) -> Tensor:
        """Rows of every head: [heads], on the CPU."""
        if self.form == "whole":
            heads, rows, _ = self.tensors["keys"].shape
            return torch.full((heads,), rows)
        if self.form == "pruned":
            return self.part("old").lengths + self.part("tail").lengths
        return self.tensors["lengths"].long()

    def part(self, name: str) -> Record:
        """The whole or ragged record under `name.`."""
        tensors = _under(self.tensors, name)
        return Record("ragged" if "lengths" in tensors else "whole", tensors)

    @classmethod
    def of(cls, rows: Layout, start: int = 0) -> Record:
        """A copy of the rows of a layout with one batch row; the first token of the passage is at position `start`."""
        if isinstance(rows, (DenseRows, RaggedRows)):
            return cls.plain(rows.view(), start)
        if isinstance(rows, CodedRows):
            view = rows.view()
            tensors = {"positions": _relative(view.positions[0], start), "lengths": view.lengths[0].to(torch.int32)}
            tensors |= prefixed("keys", _side(rows.keys)) | prefixed("values", _side(rows.values))
            return cls("coded", copied(tensors))
        if isinstance(rows, ChannelPrunedRows):
            old, tail, channels = rows.parts()
            tensors = prefixed("old", cls.plain(old.view(), start, apart=True).tensors)
            tensors |= prefixed("tail", cls.plain(tail.view(), start, apart=True).tensors)
            return cls("pruned", tensors | copied({"channels": channels[0]}))
        raise CacheStateError(f"rows held as {type(rows).__name__} cannot be taken out of a cache.")

    @classmethod
    def plain(cls, view: RowsView, start: int = 0, *, apart: bool = False) -> Record:
        """A copy of the rows of a view with one batch row, as they are read.

        apart: heads whose positions are written one by one stay so even while these are alike.
        """
        lengths, rows = view.lengths[0], view.keys.shape[2]
        if bool((lengths == rows).all()):
            positions = _relative(view.positions[0], start)
            tensors = {"keys": view.keys[0], "values": view.values[0]}
            if not apart and bool((positions == positions[:1]).all()):
                positions = positions[:1]
            every_token = bool((positions == torch.arange(rows, device=positions.device)).all())
            if not every_token or (apart and len(positions) > 1):
                tensors["positions"] = positions
            return cls("whole", copied(tensors))
        inside = view.valid[0]
        tensors = {
            "keys": view.keys[0][inside],
            "values": view.values[0][inside],
            "positions": _relative(view.head_positions[0], start)[inside],
            "lengths": lengths.to(torch.int32),
        }
        return cls("ragged", copied(tensors))

    def restored(self, start: int, codec: RowsCodec | None, dtype: torch.dtype) -> Layout:
        """The layout over this record's memory, which it never writes. codec: of this layer, where rows are coded.

        dtype: in which attention reads the rows. Raises DataError when the codec is another kind than the record's.
        """
        if self.form == "coded":
            if not isinstance(codec, KVCodec):
                raise DataError("the rows are stored as codes, and their method has no codec for them.")
            positions = _absolute(self.tensors["positions"], start)[None]
            keys = _restored_side(codec, "keys", _under(self.tensors, "keys"))
            values = _restored_side(codec, "values", _under(self.tensors, "values"))
            return CodedRows(codec, keys, values, positions, self.lengths[None], dtype)
        if self.form == "pruned":
            if not isinstance(codec, KeyChannels):
                raise DataError("the rows lack some key channels, and their method has no codec for them.")
            old, tail = (self.part(name)._rows(start) for name in ("old", "tail"))
            dim = self.tensors["tail.keys"].shape[-1]
            channels = self.tensors["channels"][None]
            return ChannelPrunedRows(old, tail, channels, dim, codec.recent, codec.block).shared()
        return self._rows(start).shared()

    def _rows(self, start: int) -> DenseRows | RaggedRows:
        keys, values = self.tensors["keys"], self.tensors["values"]
        if self.form == "ragged":
            lengths = self.lengths[None]
            positions = _absolute(self.tensors["positions"], start)
            return RaggedRows(keys, values, positions, lengths, lengths.clone(), {})
        return DenseRows(keys[None], values[None], self.positions(start)[None], self.lengths[None])

    def positions(self, start: int = 0) -> Tensor:
        """Token numbers of a whole record's rows, counted from `start`: [heads or 1, rows]."""
        stored = self.tensors.get("positions")
        if stored is None:
            rows = self.tensors["keys"].shape[1]
            stored = torch.arange(rows, device=self.tensors["keys"].device)[None]
        return _absolute(stored, start)

    def view(self, start: int = 0) -> RowsView:
        """The rows of a whole or ragged record as rectangles with a batch dimension of 1; see `RowsView`."""
        return self._rows(start).view()

    def check(self, tokens: int) -> None:
        """DataError unless the tensors fit each other and every row is one of `tokens` tokens."""
        try:
            fits = self._fits(tokens)
        except (KeyError, IndexError, ValueError, RuntimeError) as error:
            raise DataError(
                f"rows laid out as {self.form!r} lack a part, or one has another shape: {error}."
            ) from error
        if not fits:
            raise DataError(f"the parts of rows laid out as {self.form!r} do not fit each other.")

    def _fits(self, tokens: int) -> bool:
        named = self.tensors
        if self.form in ("merged", "partner"):
            names = ["fresh", "directions"] if self.form == "merged" else ["fresh"]
            held = [self.part(name) for name in names]
            found = {part.tensors["keys"].shape[0] for part in held}
            return found == {len(self.lengths)} and all(part.form == "whole" and part._fits(tokens) for part in held)
        if self.form == "pruned":
            parts = (self.part("old"), self.part("tail"))
            return named["channels"].dim() == 2 and all(part._fits(tokens) for part in parts)
        where, lengths = named.get("positions"), self.lengths
        if where is not None and (
            where.dtype not in (torch.int16, torch.int32)
            or (where.numel() and not -1 <= int(where.min()) <= int(where.max()) < tokens)
        ):
            return False
        if self.form == "coded":
            heads, width = named["positions"].shape
            sides = (named[f"{side}.counts"].long() for side in ("keys", "values"))
            sums = all(torch.equal(side[:3].sum(dim=0), lengths) and bool((side >= 0).all()) for side in sides)
            return sums and heads in (1, len(lengths)) and width == int(lengths.max())
        keys, values = named["keys"], named["values"]
        if keys.shape[:-1] != values.shape[:-1] or not keys.dtype.is_floating_point:
            return False
        if self.form == "whole":
            shapes = ((1, keys.shape[1]), keys.shape[:2])
            return keys.dim() == 3 and (where is None or tuple(where.shape) in shapes) and keys.shape[1] <= tokens
        slots = (int(lengths.sum()),)
        return bool((lengths >= 0).all()) and keys.dim() == 2 and slots == (len(keys),) == tuple(where.shape)  # type: ignore[union-attr]

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Record:
        """The record with its tensors on a device; counts stay on the CPU."""
        moved = {
            name: tensor if is_count(name) else tensor.to(device, non_blocking=non_blocking)
            for name, tensor in self.tensors.items()
        }
        return Record(self.form, moved)


def is_count(name: str) -> bool:
    """Whether a tensor of a record holds numbers of rows, which live on the CPU."""
    return name in ("lengths", "old.lengths", "tail.lengths", "keys.counts", "values.counts")


def _side(side: CodedSide) -> dict[str, Tensor]:
    tensors = {"first": side.first[0], "tail": side.tail[0]}
    tensors["counts"] = torch.stack([getattr(side, name)[0] for name in _COUNTS]).to(torch.int32)
    tensors |= prefixed("rows", side.rows) | prefixed("tables", side.tables)
    tensors |= prefixed("fixed", {name: tensor[0] for name, tensor in side.fixed.items()})
    for name, part in side.sparse.items():
        tensors |= prefixed(f"sparse.{name}", {"counts": part.counts, "values": part.values, "columns": part.columns})
    return tensors if side.block_of is None else tensors | {"block_of": side.block_of}


def _restored_side(codec: KVCodec, which: Literal["keys", "values"], tensors: Mapping[str, Tensor]) -> CodedSide:
    counts = dict(zip(_COUNTS, tensors["counts"].long()[:, None], strict=True))
    fixed = {name: tensor[None] for name, tensor in _under(tensors, "fixed").items()}
    sparse = _under(tensors, "sparse")
    parts = {
        name: SparseRows(*(sparse[f"{name}.{kind}"] for kind in ("counts", "values", "columns")))
        for name in {full.rpartition(".")[0] for full in sparse}
    }
    return CodedSide(
        codec.keys if which == "keys" else codec.values,
        codec.rotation if which == "keys" else None,
        tensors["first"][None],
        tensors["tail"][None],
        **counts,
        rows=_under(tensors, "rows"),
        tables=_under(tensors, "tables"),
        fixed=fixed,
        block_of=tensors.get("block_of"),
        sparse=parts,
    )


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with `prefix.` in front of their names."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(f"{prefix}."): tensor for n, tensor in tensors.items() if n.startswith(f"{prefix}.")}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in memory of their own, in order."""
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def _relative(positions: Tensor, start: int) -> Tensor:
    return positions if start == 0 else torch.where(positions < 0, positions, positions - start)


def _absolute(positions: Tensor, start: int) -> Tensor:
    """Positions moved by `start`, in the narrowest type; -1 stays."""
    last = start + (int(positions.max()) if positions.numel() else 0)
    moved = torch.where(positions < 0, -1, positions.to(torch.int32) + start)
    return moved.to(position_dtype(last))
