"""Rows of one layer in buffers that never move: lengths and slots live on the device, shapes are fixed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfoundry.layouts import Layout
from kvfoundry.layouts.base import RowsView, Stretches
from kvfoundry.layouts.storing import keep_rows


@dataclass(frozen=True)
class Plan:
    """How many slots the heads of one layer get, and what becomes of a full head.

    capacities: [batch, heads] int32 on the CPU. wraps: [batch, heads] int32 on the CPU, the slot at which a full head
    goes on. spends: a full head has one row that is spent, which the next one takes the place of. even: every head
    gets `width` slots, whatever of them it may use; otherwise that is the most of any head.
    """

    capacities: Tensor
    wraps: Tensor
    spends: bool
    even: bool

    width: int

    @property
    def slots(self) -> int:
        """Slots of all heads together."""
        return self.capacities.numel() * self.width if self.even else int(self.capacities.sum())


@dataclass
class StaticRows:
    """keys, values: [slots, dim]; positions: int32 [slots], token index of every row.

    starts: [batch, heads] int64; slots (where the next row goes, counted within the head), lengths, capacities, wraps:
    [batch, heads] int32. All on the device. width: the most slots of a head; even: every head has so many.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    starts: Tensor
    slots: Tensor
    lengths: Tensor
    capacities: Tensor
    wraps: Tensor
    width: int
    even: bool
    spends: bool

    @classmethod
    def empty(cls, plan: Plan, like: Stretches) -> StaticRows:
        """Buffers for rows like these; what they hold is finite and means nothing."""
        device, shape, slots = like.keys.device, plan.capacities.shape, plan.slots

        def counts() -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            like.keys.new_zeros(slots, like.keys.shape[1]),
            like.values.new_zeros(slots, like.values.shape[1]),
            torch.full((slots,), -1, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            counts(), counts(), counts(), counts(),
            plan.width, plan.even, plan.spends,
        )  # fmt: skip

    def fits(self, plan: Plan, like: Stretches) -> bool:
        """Whether rows under this plan can move in without new buffers, so that what reads them need not change."""
        same = (
            self.even == plan.even
            and self.spends == plan.spends
            and self.starts.shape == plan.capacities.shape
            and (self.keys.shape[1], self.values.shape[1]) == (like.keys.shape[1], like.values.shape[1])
            and (self.keys.dtype, self.keys.device) == (like.keys.new_zeros(0).dtype, like.keys.device)
        )
        return same and (plan.width <= self.width if self.even else plan.slots <= self.keys.shape[0])

    def fill(self, plan: Plan, rows: Layout) -> None:
        """Copy the newest rows of a layout in, as many as each head has slots for."""
        view = rows.view()
        if self.even:
            starts = torch.arange(plan.capacities.numel()).view(plan.capacities.shape) * self.width
        else:
            self.width = plan.width
            flat = plan.capacities.flatten().long()
            starts = (flat.cumsum(0) - flat).view(plan.capacities.shape)
        lengths = torch.minimum(view.lengths, plan.capacities.long())
        for target, source in (
            (self.starts, starts),
            (self.lengths, lengths),
            (self.slots, torch.where(lengths == plan.capacities, plan.wraps, lengths)),
            (self.capacities, plan.capacities),
            (self.wraps, plan.wraps),
        ):
            target.copy_(source)
        first, width = view.lengths - lengths, view.keys.shape[2]
        if self.even and not bool(first.any()) and bool((lengths == width).all()):
            for target, part in ((self.keys, view.keys), (self.values, view.values)):
                self.rectangle(target)[:, :, :width] = part
            self.rectangle(self.positions)[:, :, :width] = view.head_positions
            return
        number = torch.arange(width)
        inside = ((number >= first[..., None]) & (number < view.lengths[..., None])).to(self.keys.device)
        at = (starts - first)[..., None] + number
        at = at.to(self.keys.device)[inside]
        self.keys[at], self.values[at] = view.keys[inside], view.values[inside]
        self.positions[at] = view.head_positions[inside].to(torch.int32)

    def rectangle(self, flat: Tensor) -> Tensor:
        """A buffer of even heads as [batch, heads, width, ...], in place."""
        batch, heads = self.starts.shape
        return flat[: batch * heads * self.width].view(batch, heads, self.width, *flat.shape[1:])

    def gathered(self, flat: Tensor) -> Tensor:
        """A buffer as [batch, heads, width, ...]: in place for even heads, otherwise a copy that ends in repeats."""
        if self.even:
            return self.rectangle(flat)
        number = torch.arange(self.width, device=flat.device)
        return flat[self.starts[..., None] + torch.minimum(number, self.capacities[..., None] - 1)]

    def layout(self, upto: Tensor, columns: dict[str, Tensor]) -> Layout:
        """The rows of tokens before `upto` of each sequence in memory of their own, in the order of their positions.

        upto: [batch] on the CPU. columns: statistics, [batch, heads, width, ...].
        """
        number = torch.arange(self.width, device=self.keys.device)
        positions = self.gathered(self.positions)
        inside = (number < self.lengths[..., None]) & (positions < upto.to(positions.device)[:, None, None])
        if self.spends:
            full = self.lengths == self.capacities
            inside &= ~(full[..., None] & (number == self.slots[..., None]))
        counts = inside.sum(dim=-1).cpu()
        beyond = torch.iinfo(positions.dtype).max
        order = positions.masked_fill(~inside, beyond).argsort(dim=-1, stable=True)[..., : int(counts.max())]
        order = order.masked_fill(number[: order.shape[2]] >= counts.to(order.device)[..., None], -1)
        view = RowsView(self.gathered(self.keys), self.gathered(self.values), positions, counts, columns)
        return keep_rows(view, order, counts)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that holds memory."""
        yield from (self.keys, self.values, self.positions, self.starts, self.slots, self.lengths, self.capacities)
        yield self.wraps
