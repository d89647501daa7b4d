"""Bounds of the whole pages of one layer, kept up as rows arrive."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvfoundry.layouts.base import Stretches
from kvfoundry.reading.pages import page_bounds

# Pages that are bounded at once when many are new: the gathered keys stay small.
_BLOCK = 64
# Spare pages when the buffers grow.
_SPARE = 16


class PageState:
    """low, high: [batch, heads, room for pages, head_dim]; counts: [batch, heads] whole pages bounded, on the CPU.

    Only whole pages have a place here: their bounds never change while their rows stay.
    """

    def __init__(self, page: int, low: Tensor, high: Tensor, counts: Tensor):
        self.page, self.low, self.high, self.counts = page, low, high, counts
        self._shared = False

    @classmethod
    def empty(cls, page: int, rows: Stretches) -> PageState:
        """No page bounded yet for these rows."""
        batch, heads = rows.lengths.shape
        bounds = rows.keys.new_zeros(batch, heads, 0, rows.keys.shape[1])
        return cls(page, bounds, bounds.clone(), torch.zeros_like(rows.lengths))

    def extend(self, rows: Stretches) -> None:
        """Bound every page that has become whole."""
        whole = rows.lengths // self.page
        if bool((whole <= self.counts).all()):
            return
        self._reserve(int(whole.max()))
        first, last = int(self.counts.min()), int(whole.max())
        starts = rows.starts
        for start in range(first, last, _BLOCK):
            stop = min(start + _BLOCK, last)
            slots = torch.arange(start * self.page, stop * self.page, device=starts.device)
            number = torch.arange(start, stop)
            new = ((number >= self.counts[..., None]) & (number < whole[..., None])).to(starts.device)
            inside = new.repeat_interleave(self.page, dim=-1)
            low, high = page_bounds(rows.keys[torch.where(inside, starts[..., None] + slots, 0)], self.page)
            for bounds, found in ((self.low, low), (self.high, high)):
                bounds[:, :, start:stop] = torch.where(new[..., None], found, bounds[:, :, start:stop])
        self.counts = torch.maximum(whole, self.counts)

    def _reserve(self, pages: int) -> None:
        """Make room for `pages` pages, in memory that only this state writes."""
        room = self.low.shape[2]
        if pages <= room and not self._shared:
            return
        room = pages + _SPARE if pages > room else room

        def moved(bounds: Tensor) -> Tensor:
            buffer = bounds.new_zeros(*bounds.shape[:2], room, bounds.shape[3])
            buffer[:, :, : bounds.shape[2]] = bounds
            return buffer

        self.low, self.high, self._shared = moved(self.low), moved(self.high), False

    def with_room(self, pages: int) -> tuple[Tensor, Tensor]:
        """low and high with a place for so many pages at least; those of pages that are not whole mean nothing."""
        if pages > self.low.shape[2]:
            self._reserve(pages)
        return self.low, self.high

    def truncate(self, lengths: Tensor) -> None:
        """Forget pages that are no longer whole when every head has `lengths` rows."""
        self.counts = torch.minimum(self.counts, lengths // self.page)

    def selected(self, indices: Tensor) -> PageState:
        """The batch rows `indices`."""
        at = indices.to(self.low.device)
        return PageState(self.page, self.low[at], self.high[at], self.counts[indices.cpu()])

    def shared(self) -> PageState:
        """A second state over the same memory; whichever writes first takes a copy."""
        twin = PageState(self.page, self.low, self.high, self.counts)
        self._shared = twin._shared = True
        return twin

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that holds memory for the bounds."""
        yield from (self.low, self.high)
