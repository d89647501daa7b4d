"""Reading pages: bounds of the keys of every page of static rows, kept up by each step (Quest)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfoundry.engine.hosted import Hosted
from kvfoundry.engine.rows import StaticRows
from kvfoundry.reading.reader import PageReader


def reading_refusal(reader: object) -> str | None:
    """Why what picks rows to read has no form of fixed shape; None where it has."""
    if not isinstance(reader, PageReader):
        return "reads rows in a way of its own"
    if reader.rule != "kernel":
        return f"reads pages by the rule {reader.rule!r}"
    if reader.granularity != "kv_head":
        return "reads pages of its own for every query head"
    return None


def budget_refusal(reader: PageReader, budget: Tensor, lengths: Tensor) -> str | None:
    """Why these budgets [batch] cannot be one number of pages for heads of these lengths [batch, heads]."""
    if bool((budget != budget[0]).any()):
        return "reads a different number of pages of every sequence"
    if int(budget[0]) % reader.page and bool((lengths <= budget[0]).any()):
        return f"reads all rows up to a budget of {int(budget[0])}, which is no whole number of pages"
    return None


class Paging:
    """Bounds of one layer's pages, and how many of them a step reads.

    low, high: [batch, heads, pages, head_dim]. page: rows of a page; budget: pages to read, the last one among them.
    hosted: older rows, which the pages begin with.
    """

    def __init__(self, reader: PageReader, budget: int, rows: StaticRows, hosted: Hosted | None = None):
        self.page, self.group, self.rows, self.hosted = reader.page, reader.group, rows, hosted
        self.budget = max(2, budget // reader.page)
        before = 0 if hosted is None else int(hosted.rows.stored.max())
        room = -(-(before + rows.width) // self.page)
        self.low = rows.keys.new_zeros(*rows.starts.shape, room, rows.keys.shape[1])
        self.high = torch.zeros_like(self.low)

    def lengths(self) -> Tensor:
        """Rows of every head that are in pages: int32 [batch, heads]."""
        return self.rows.lengths if self.hosted is None else self.rows.lengths + self.hosted.counts

    def begin(self) -> None:
        """Bound the pages of rows that have just moved in."""
        lengths = self.lengths()
        for head in range(lengths.shape[1]):  # one at a time: the copies stay small
            keys = self._keys_of(head)
            inside = torch.arange(keys.shape[1], device=keys.device) < lengths[:, head, None]
            for bounds, fill, reduce in ((self.low, torch.inf, torch.amin), (self.high, -torch.inf, torch.amax)):
                padded = keys.masked_fill(~inside[..., None], fill)
                missing = bounds.shape[2] * self.page - padded.shape[1]
                padded = torch.nn.functional.pad(padded, (0, 0, 0, max(0, missing)), value=fill)
                found = reduce(padded[:, : bounds.shape[2] * self.page].unflatten(1, (-1, self.page)), 2)
                bounds[:, head] = torch.where(found.isinf(), 0, found)

    def _keys_of(self, head: int) -> Tensor:
        """[batch, rows, head_dim], what lies behind the last row of a sequence means nothing."""
        newer = self.rows.gathered(self.rows.keys)[:, head]
        if self.hosted is None:
            return newer
        pairs = zip(self.hosted.keys_of(head), newer, strict=True)
        return pad_sequence([torch.cat([older, new]) for older, new in pairs], batch_first=True)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that holds memory."""
        yield from (self.low, self.high)
