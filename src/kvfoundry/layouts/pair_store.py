"""What pairs of neighbouring layers hold together: one direction per row, and the rows that stay exact (MiniCache)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfoundry.codecs.minicache import MergedRows, merge_rows, retained_count, widest_angles
from kvfoundry.errors import CacheStateError, DataError, UnsupportedModelError
from kvfoundry.layouts.base import Block, RowsView
from kvfoundry.layouts.dense import DenseRows

Half = Literal["earlier", "later"]
Side = Literal["keys", "values"]
HALVES: tuple[Half, Half] = ("earlier", "later")
SIDES: tuple[Side, Side] = ("keys", "values")

Rows = RowsView | tuple[Tensor, Tensor]

# Stands for "no row" in an ascending table of slots.
_NONE = torch.iinfo(torch.int32).max


class LayerRows(NamedTuple):
    """Keys and values of one layer, [batch, heads, rows, dim] each."""

    keys: Tensor
    values: Tensor


class RestoredPair(NamedTuple):
    """The rows of both layers of a pair."""

    earlier: LayerRows
    later: LayerRows


@dataclass(frozen=True)
class Retained:
    """Rows of one side that stay exact in both layers. Never written in place.

    slots: [batch, heads, widest], ascending row numbers; rows: per half [batch, heads, widest, dim], zeros behind those
    of a head with fewer. bound: [batch, heads] the largest angle that the prompt merged, below 0 without any: what a
    later row has to exceed.
    """

    slots: Tensor
    rows: dict[Half, Tensor]
    bound: Tensor

    @property
    def counts(self) -> Tensor:
        """[batch, heads]."""
        return (self.slots != _NONE).sum(dim=-1)

    def put_into(self, buffer: Tensor, start: int, half: Half) -> None:
        """Write the exact rows of the slots from `start` on into a buffer [batch, heads, n + 1, dim] of n slots.

        The last place of the buffer takes what has to go nowhere.
        """
        count, slots = buffer.shape[2] - 1, self.slots.to(buffer.device)
        bounds = torch.tensor([start, start + count], dtype=slots.dtype, device=slots.device)
        first, last = torch.searchsorted(slots, bounds.expand(*slots.shape[:2], 2).contiguous()).unbind(-1)
        width = int((last - first).max()) if first.numel() else 0
        if width == 0:
            return
        index = first[..., None] + torch.arange(width, device=first.device)
        inside = index < last[..., None]
        index = index.clamp(max=slots.shape[2] - 1)
        target = (slots.gather(2, index) - start).masked_fill(~inside, count).long()[..., None]
        exact = self.rows[half].gather(2, index[..., None].expand(-1, -1, -1, buffer.shape[3]))
        buffer.scatter_(2, target.expand_as(exact), exact)

    def extended(self, slots: Tensor, rows: dict[Half, Tensor], bound: Tensor) -> Retained:
        """With the rows of new, larger slots [batch, heads, n], `_NONE` for none; rows: [batch, heads, n, dim]."""
        both = torch.cat([self.slots, slots], dim=2)
        order = both.argsort(dim=2, stable=True)
        width = int((both != _NONE).sum(dim=-1).max()) if both.numel() else 0
        order = order[..., :width]
        merged: dict[Half, Tensor] = {}
        for half in HALVES:
            index = order.to(rows[half].device)[..., None].expand(-1, -1, -1, rows[half].shape[3])
            merged[half] = torch.cat([self.rows[half], rows[half]], dim=2).gather(2, index)
        return Retained(both.gather(2, order), merged, bound)

    def truncated(self, lengths: Tensor) -> Retained:
        """Those among the first `lengths` ([batch, heads]) rows."""
        slots = self.slots.masked_fill(self.slots >= lengths.to(self.slots.device)[..., None], _NONE)
        width = int((slots != _NONE).sum(dim=-1).max()) if slots.numel() else 0
        rows = {half: self.rows[half][:, :, :width].clone() for half in HALVES}
        return Retained(slots[..., :width].clone(), rows, self.bound)

    def selected(self, indices: Tensor) -> Retained:
        """The batch rows `indices`."""
        rows = {half: _picked(self.rows[half], indices) for half in HALVES}
        return Retained(_picked(self.slots, indices), rows, _picked(self.bound, indices))


class MergedPair:
    """The merged rows of one pair of layers.

    Directions and positions are stored once; a magnitude per row and the retained rows once for each layer. Where a
    split of the model runs between the two layers, what both share lies on the device of the earlier one, and a tile of
    it goes to the other device whenever the later one reads it.
    """

    def __init__(
        self, directions: DenseRows, magnitudes: dict[tuple[Half, Side], Tensor], retained: dict[Side, Retained]
    ):
        self.directions, self.magnitudes, self.retained = directions, magnitudes, retained

    @classmethod
    def of_prompt(cls, earlier: RowsView, later: RowsView, t: float, share: float) -> tuple[MergedPair, float]:
        """Merge a whole prompt: of every head, `share` of the rows, those with the largest angles, stay exact.

        Also returns how far apart the rows are: the mean angle in degrees, over keys and values.
        """
        home, later = later.keys.device, _moved(later, earlier.keys.device)
        directions: dict[Side, Tensor] = {}
        magnitudes: dict[tuple[Half, Side], Tensor] = {}
        retained: dict[Side, Retained] = {}
        valid, angles = later.valid, []
        for side in SIDES:
            merged = merge_rows(getattr(earlier, side), getattr(later, side), t)
            counts = torch.tensor([[retained_count(n, share) for n in row] for row in later.lengths.tolist()])
            angles.append(merged.angle[valid].mean())
            angle = merged.angle.masked_fill(~valid, -1.0)
            slots = widest_angles(angle, counts)
            others = F.pad(angle, (0, 1), value=-1.0).scatter(2, slots.where(slots >= 0, angle.shape[2]), -1.0)
            bound = others.amax(dim=2)
            retained[side] = _taken(earlier, later, side, slots, 0, bound, home)
            directions[side], magnitudes["earlier", side], length = _stored(merged, later.keys.dtype)
            magnitudes["later", side] = length.to(home)
        rows = DenseRows(
            directions["keys"] * valid[..., None],
            directions["values"] * valid[..., None],
            later.positions.clone(),
            later.lengths,
        )
        return cls(rows, magnitudes, retained), math.degrees(float(torch.stack(angles).mean()))

    def append(self, earlier: RowsView, later: RowsView, t: float, share: float) -> None:
        """Merge new rows behind the others, each decided by itself.

        A row stays exact when its angle exceeds all that the prompt merged, and while no more than `share` of the rows
        so far are exact: so the rows may come one at a time or several at once.
        """
        home, later = later.keys.device, _moved(later, earlier.keys.device)
        before = self.directions.lengths
        counts = None if bool((later.lengths == later.keys.shape[2]).all()) else later.lengths
        new: dict[Side, Tensor] = {}
        magnitudes: dict[tuple[Half, Side], Tensor] = {}
        for side in SIDES:
            merged = merge_rows(getattr(earlier, side), getattr(later, side), t)
            held = self.retained[side]
            slots = self._exceeding(merged.angle.masked_fill(~later.valid, -1.0), held, before, share)
            if bool((slots >= 0).any()):
                bound = held.bound
                taken = _taken(earlier, later, side, slots, before, bound, home)
                self.retained[side] = held.extended(taken.slots, taken.rows, bound)
            new[side], magnitudes["earlier", side], length = _stored(merged, later.keys.dtype)
            magnitudes["later", side] = length.to(home)
        last = int(later.positions.max())
        self.directions = self.directions.append(new["keys"], new["values"], later.positions, counts, last)
        for name, column in magnitudes.items():
            self.magnitudes[name] = _behind(self.magnitudes[name], column, before, counts)

    def _exceeding(self, angle: Tensor, held: Retained, before: Tensor, share: float) -> Tensor:
        """Numbers of the new rows that stay exact: [batch, heads, n], -1 behind the last."""
        counts, tokens = held.counts, angle.shape[2]
        taken = torch.zeros_like(angle, dtype=torch.bool)
        for token in range(tokens):
            quota = torch.tensor([[retained_count(n + token + 1, share) for n in row] for row in before.tolist()])
            taken[..., token] = (angle[..., token] > held.bound) & (counts < quota.to(counts.device))
            counts = counts + taken[..., token]
        number = torch.arange(tokens, device=angle.device).expand_as(angle).masked_fill(~taken, tokens)
        width = int(taken.sum(dim=-1).max())
        number = number.sort(dim=-1).values[..., :width]
        return number.masked_fill(number == tokens, -1)

    @property
    def lengths(self) -> Tensor:
        """Merged rows per batch row and head: [batch, heads], on the CPU."""
        return self.directions.lengths

    def device(self, half: Half) -> torch.device:
        """Where one layer of the pair computes."""
        return self.magnitudes[half, "keys"].device

    def restored(self, block: Block, start: int, half: Half) -> Block:
        """A tile of directions (rows from `start` on, all heads) as rows of one layer, on its device."""
        count, device = block.keys.shape[2], self.device(half)
        sides: dict[Side, Tensor] = {}
        for side in SIDES:
            direction = getattr(block, side).to(device)
            buffer = direction.new_empty(*direction.shape[:2], count + 1, direction.shape[3])
            buffer[:, :, :count] = direction * self.magnitudes[half, side][:, :, start : start + count, None]
            self.retained[side].put_into(buffer, start, half)
            sides[side] = buffer[:, :, :count]
        return replace(block, keys=sides["keys"], values=sides["values"], positions=block.positions.to(device))

    def rows(self, half: Half) -> RowsView:
        """All rows of one layer: a copy, for a look; attention restores tile by tile."""
        view = self.directions.view()
        block = Block(slice(None), slice(None), view.keys, view.values, view.positions, True)
        whole = self.restored(block, 0, half)
        return RowsView(whole.keys, whole.values, whole.positions, view.lengths)

    def selected(self, indices: Tensor) -> MergedPair:
        """The batch rows `indices`, in memory of their own."""
        directions = self.directions.select_batch(indices)
        rows = directions.view().keys.shape[2]
        magnitudes = {name: _picked(column, indices)[:, :, :rows].clone() for name, column in self.magnitudes.items()}
        return MergedPair(directions, magnitudes, {s: self.retained[s].selected(indices) for s in SIDES})

    def truncated(self, lengths: Tensor) -> MergedPair:
        """The first `lengths` rows of every head, at most as many as there are."""
        lengths = torch.minimum(lengths, self.lengths)
        retained = {side: self.retained[side].truncated(lengths) for side in SIDES}
        return MergedPair(self.directions.truncated(lengths), dict(self.magnitudes), retained)

    def shared(self) -> MergedPair:
        """A second pair over the same memory; whichever writes first takes a copy."""
        return MergedPair(self.directions.shared(), dict(self.magnitudes), dict(self.retained))

    def with_later_on(self, device: torch.device) -> MergedPair:
        """The same pair with what the later layer alone has on its device."""
        magnitudes = {
            name: column.to(device) if name[0] == "later" else column for name, column in self.magnitudes.items()
        }
        retained = {
            side: replace(held, rows={**held.rows, "later": held.rows["later"].to(device)})
            for side, held in self.retained.items()
        }
        return MergedPair(self.directions, magnitudes, retained)

    def tensors(self, half: Half) -> Iterator[Tensor]:
        """What one layer adds to memory: the earlier one directions and positions, each its own magnitudes and rows."""
        if half == "earlier":
            yield from self.directions.tensors()
            for side in SIDES:
                yield self.retained[side].slots
                yield self.retained[side].bound
        for side in SIDES:
            yield self.magnitudes[half, side]
            yield self.retained[side].rows[half]


def _taken(
    earlier: RowsView,
    later: RowsView,
    side: Side,
    slots: Tensor,
    before: Tensor | int,
    bound: Tensor,
    home: torch.device,
) -> Retained:
    """The exact rows at `slots` of two views, under the numbers that they get behind `before` older rows.

    home: the device of the later layer, where its rows go.
    """
    index = slots.clamp(min=0)[..., None]
    rows: dict[Half, Tensor] = {}
    for half, view in zip(HALVES, (earlier, later), strict=True):
        source = getattr(view, side)
        rows[half] = source.gather(2, index.expand(-1, -1, -1, source.shape[3])) * (slots >= 0)[..., None]
    rows["later"] = rows["later"].to(home)
    offset = before.to(slots.device)[..., None] if isinstance(before, Tensor) else before
    return Retained((slots + offset).masked_fill(slots < 0, _NONE).to(torch.int32), rows, bound)


def _moved(view: RowsView, device: torch.device) -> RowsView:
    """Rows without statistics on a device; the view itself when they are there."""
    if view.keys.device == device:
        return view
    return RowsView(view.keys.to(device), view.values.to(device), view.positions.to(device), view.lengths)


def _picked(tensor: Tensor, indices: Tensor) -> Tensor:
    """The batch rows `indices`, which may be on another device."""
    return tensor[indices.to(tensor.device)]


def _stored(merged: MergedRows, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The direction in the type of the rows, and what it has to be multiplied with in the earlier and later layer.

    Rounding changes the length of a direction; dividing by it here keeps the lengths of the restored rows exact.
    """
    direction = merged.direction.to(dtype)
    length = direction.float().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return direction, merged.earlier_magnitude / length, merged.later_magnitude / length


def _behind(column: Tensor, new: Tensor, lengths: Tensor, counts: Tensor | None) -> Tensor:
    """A column [batch, heads, rows] with `counts` new entries (None: all) behind the first `lengths` of every head."""
    width = int((lengths + (new.shape[2] if counts is None else counts)).max())
    grown = F.pad(column, (0, width - column.shape[2])) if width > column.shape[2] else column.clone()
    inside = (
        torch.arange(new.shape[2]) < (torch.full_like(lengths, new.shape[2]) if counts is None else counts)[..., None]
    )
    batch, head, token = inside.nonzero(as_tuple=True)
    slot = lengths[batch, head] + token
    batch, head, token, slot = (index.to(new.device) for index in (batch, head, token, slot))
    grown[batch, head, slot] = new[batch, head, token]
    return grown


class MiniCachePairStore:
    """The merged pairs of the layers of one cache, under the numbers of their layers.

    t: place of the shared direction between the earlier layer's (0) and the later one's (1). retention: share of the
    rows of every head that stay exact. A pair is named by its two layers, in either order; results name the earlier
    (smaller number) first. CacheStateError for a pair of a layer with itself, and for one that is not there.
    """

    def __init__(self, t: float = 0.6, retention: float = 0.05):
        self.t, self.retention = t, retention
        self._pairs: dict[tuple[int, int], MergedPair] = {}
        self._apart: dict[tuple[int, int], float] = {}

    def merge_pair(self, earlier: int, later: int, earlier_rows: Rows, later_rows: Rows) -> None:
        """Merge rows that both layers hold: the first ones as a prompt, later ones each by itself.

        earlier_rows, later_rows: the rows of the two layers named, views of a layout or (keys, values).
        Raises UnsupportedModelError when the rows of the layers differ in shape, DataError when they are not finite.
        """
        key = _pair(earlier, later)
        seen = int(self._pairs[key].lengths.max()) if key in self._pairs else 0
        views = [_as_view(rows, seen) for rows in (earlier_rows, later_rows)]
        if (earlier, later) != key:
            views.reverse()
        shapes = [(tuple(view.keys.shape), tuple(view.values.shape)) for view in views]
        if shapes[0] != shapes[1]:
            raise UnsupportedModelError(
                f"layers {key[0]} and {key[1]} cannot be merged: keys and values of the one are {shapes[0]}, of the "
                f"other {shapes[1]}."
            )
        for layer, view in zip(key, views, strict=True):
            if not bool(torch.isfinite(view.keys).all() and torch.isfinite(view.values).all()):
                raise DataError(
                    f"layer {layer} has keys or values that are not finite, so minicache cannot merge them."
                )
        if key in self._pairs:
            self._pairs[key].append(views[0], views[1], self.t, self.retention)
        else:
            self._pairs[key], self._apart[key] = MergedPair.of_prompt(views[0], views[1], self.t, self.retention)

    def has_pair(self, earlier: int, later: int) -> bool:
        """Whether rows of these two layers are merged."""
        return _pair(earlier, later) in self._pairs

    def restore_pair(self, earlier: int, later: int) -> RestoredPair:
        """The rows of both layers as attention sees them: direction times magnitude, retained rows exact. A copy."""
        pair = self.pair(earlier, later)
        views = (pair.rows(half) for half in HALVES)
        return RestoredPair(*(LayerRows(view.keys, view.values) for view in views))

    def retention_indices(self, earlier: int, later: int) -> LayerRows:
        """Numbers of the rows that stay exact, of keys and of values: [batch, heads, widest], -1 behind the last."""
        pair = self.pair(earlier, later)
        slots = (pair.retained[side].slots for side in SIDES)
        return LayerRows(*(each.masked_fill(each == _NONE, -1).long() for each in slots))

    def clear_pair(self, earlier: int, later: int) -> None:
        """Forget the rows of this pair."""
        self._pairs.pop(_pair(earlier, later), None)
        self._apart.pop(_pair(earlier, later), None)

    def clear(self) -> None:
        """Forget all pairs."""
        self._pairs.clear()
        self._apart.clear()

    @property
    def furthest(self) -> tuple[tuple[int, int], float] | None:
        """The pair whose prompt rows differ most, and their mean angle in degrees; None before the first prompt."""
        return max(self._apart.items(), key=lambda item: item[1]) if self._apart else None

    def pair(self, earlier: int, later: int) -> MergedPair:
        """What is stored of a pair."""
        key = _pair(earlier, later)
        if key not in self._pairs:
            raise CacheStateError(f"layers {key[0]} and {key[1]} have no merged rows.")
        return self._pairs[key]

    def put(self, earlier: int, later: int, pair: MergedPair) -> None:
        """Exchange what is stored of a pair."""
        self._pairs[_pair(earlier, later)] = pair

    def fork(self) -> MiniCachePairStore:
        """An independent store over the same memory."""
        twin = copy.copy(self)
        twin._pairs = {key: pair.shared() for key, pair in self._pairs.items()}
        twin._apart = dict(self._apart)
        return twin


def _pair(earlier: int, later: int) -> tuple[int, int]:
    if earlier == later:
        raise CacheStateError(f"a pair needs two layers; layer {earlier} cannot be merged with itself.")
    return min(earlier, later), max(earlier, later)


def _as_view(rows: Rows, seen: int) -> RowsView:
    """Rows as a view; bare keys and values are tokens without padding, `seen` of which came before."""
    if isinstance(rows, RowsView):
        return rows
    keys, values = rows
    positions = torch.arange(seen, seen + keys.shape[2], device=keys.device).expand(keys.shape[0], 1, -1)
    return RowsView(keys, values, positions, torch.full(keys.shape[:2], keys.shape[2]))
