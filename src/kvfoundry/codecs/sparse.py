"""Which numbers are kept exactly, and how they are stored: value and column per number, rows one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


def extremes(values: Tensor, count: int) -> Tensor:
    """Boolean mask of the `count` largest and `count` smallest numbers along the last axis.

    Exactly 2 `count` numbers (or all, where there are fewer), ties included: among equals an arbitrary one is taken,
    never more.
    """
    length = values.shape[-1]
    mask = torch.zeros_like(values, dtype=torch.bool)
    if count <= 0:
        return mask
    if 2 * count >= length:
        return torch.ones_like(mask)
    order = values.argsort(dim=-1, stable=True)
    mask.scatter_(-1, order[..., :count], True)
    return mask.scatter_(-1, order[..., length - count :], True)


def column_dtype(width: int) -> torch.dtype:
    """The narrowest type for a column number of a row of `width`."""
    return torch.uint8 if width <= 256 else torch.int16


def put(rows: Tensor, values: Tensor, columns: Tensor) -> Tensor:
    """Rows [..., width] with the numbers `values` [..., n] in `columns` [..., n]; column `width` is nowhere."""
    result = rows.flatten(0, -2).clone()
    columns, values = columns.flatten(0, -2), values.flatten(0, -2)
    present = columns.long() < rows.shape[-1]
    row = torch.arange(result.shape[0], device=rows.device)[:, None].expand_as(present)
    result[row[present], columns[present].long()] = values[present].to(rows.dtype)
    return result.view_as(rows)


@dataclass(frozen=True)
class SparseRows:
    """Some numbers of every row, the rows flattened to one axis.

    counts: [rows] numbers per row, int16. values: [total], row after row, in the cache's dtype. columns: [total] their
    places, ascending within a row.
    """

    counts: Tensor
    values: Tensor
    columns: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> SparseRows:
        """The masked numbers of [rows, width]."""
        counts = mask.sum(dim=-1).to(torch.int16)
        columns = mask.nonzero()[:, 1].to(column_dtype(values.shape[-1]))
        return cls(counts, values[mask], columns)

    def rows(self, index: Tensor) -> SparseRows:
        """The rows `index` ([n], repeats allowed; -1 for a row without numbers), without touching a number."""
        counts = self.counts[index.clamp(min=0)].long() * (index >= 0)
        starts = self.counts.long().cumsum(0) - self.counts
        total = int(counts.sum())
        row = torch.arange(index.numel(), device=index.device).repeat_interleave(counts, output_size=total)
        within = torch.arange(total, device=index.device) - (counts.cumsum(0) - counts)[row]
        source = starts[index[row]] + within
        return SparseRows(counts.to(torch.int16), self.values[source], self.columns[source])

    @classmethod
    def joined(cls, parts: list[SparseRows]) -> SparseRows:
        """The rows of all parts, one part after the other."""
        return cls(*(torch.cat(tensors) for tensors in zip(*(part.tensors() for part in parts), strict=True)))

    def padded(self, index: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Values and columns of the rows `index` [...], as rectangles [..., widest]; column `width` where is none.

        index: -1 for a row without numbers.
        """
        picked = self.rows(index.flatten())
        counts = picked.counts.long()
        widest = int(counts.max()) if counts.numel() else 0
        slot = torch.arange(widest, device=index.device)
        present = slot < counts[:, None]
        values = self.values.new_zeros(counts.numel(), widest)
        columns = torch.full((counts.numel(), widest), width, device=index.device)
        values[present], columns[present] = picked.values, picked.columns.long()
        return values.view(*index.shape, widest), columns.view(*index.shape, widest)

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.counts, self.values, self.columns)
