"""Layouts that hold their rows in two parts: an older one in another form, and the newest rows whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvfoundry.kernels.attention.naive import query_block
from kvfoundry.kernels.running_attention import TILE, RunningAttention
from kvfoundry.layouts.base import Block, Columns, Reading, RowsView
from kvfoundry.layouts.dense import DenseRows
from kvfoundry.layouts.ragged import RaggedRows
from kvfoundry.layouts.storing import keep_rows

WholeRows = DenseRows | RaggedRows


def tiles(block: Block) -> Iterator[tuple[slice, Block]]:
    """A block cut along its rows into pieces of at most `TILE`, with the rows that each holds."""
    for start in range(0, block.keys.shape[2], TILE):
        at = slice(start, min(start + TILE, block.keys.shape[2]))
        yield (
            at,
            Block(
                block.batch,
                block.heads,
                block.keys[:, :, at],
                block.values[:, :, at],
                block.positions[:, :, at],
                block.complete,
            ),
        )


def take_in(
    running: RunningAttention, block: Block, query: Tensor, query_positions: Tensor, reading: Reading, groups: int
) -> None:
    """Attend to one block, which is no longer than a tile.

    query: [batch, query_heads, queries, dim] of all heads, in the channels of the block's keys.
    """
    span = block.query_heads(groups)
    asked, positions = query[block.batch, span], query_positions[block.batch]
    visibility = reading.visibility(positions, block.positions, own=False, complete=block.complete)
    step = query_block(asked.device, asked.shape[0], asked.shape[1], block.keys.shape[2])
    for start in range(0, asked.shape[2], step):
        at = slice(start, min(start + step, asked.shape[2]))
        seen = None if visibility.pattern == "full" else visibility.block(at.start, at.stop)
        running.add(asked[:, :, at], block.keys, block.values, seen, (block.batch, span, at))


def take_in_rows(
    running: RunningAttention, rows: WholeRows, query: Tensor, query_positions: Tensor, reading: Reading
) -> None:
    """Attend to all rows of a layout, tile by tile."""
    groups = query.shape[1] // rows.lengths.shape[1]
    for block in rows.blocks():
        for _, tile in tiles(block):
            take_in(running, tile, query, query_positions, reading, groups)


def front(view: RowsView, counts: Tensor) -> WholeRows:
    """The first `counts` ([batch, heads], on the CPU) rows of every head, in memory of their own."""
    if _is_even(view, counts):
        return _sliced(view, 0, int(counts.max()), counts)
    return _gathered(view, torch.zeros_like(counts), counts)


def behind(view: RowsView, counts: Tensor) -> WholeRows:
    """The rows of every head behind its first `counts`, in memory of their own."""
    if _is_even(view, counts):
        return _sliced(view, int(counts.max()), view.keys.shape[2], view.lengths - counts)
    return _gathered(view, counts, view.lengths - counts)


def _is_even(view: RowsView, counts: Tensor) -> bool:
    return bool((counts == counts.max()).all()) and bool((view.lengths == view.keys.shape[2]).all())


def _sliced(view: RowsView, start: int, stop: int, lengths: Tensor) -> DenseRows:
    keys, values, positions = (tensor[:, :, start:stop].clone() for tensor in (view.keys, view.values, view.positions))
    return DenseRows(keys, values, positions, lengths)


def _gathered(view: RowsView, starts: Tensor, counts: Tensor) -> WholeRows:
    offset = torch.arange(int(counts.max()) if counts.numel() else 0)
    slots = (starts[..., None] + offset).masked_fill(offset >= counts[..., None], -1)
    return keep_rows(RowsView(view.keys, view.values, view.positions, view.lengths), slots.to(view.keys.device), counts)


def joined(first: RowsView, second: RowsView, columns: Columns) -> RowsView:
    """One view of two parts, the rows of `second` directly behind those of `first` in every head."""
    heads = first.keys.shape[1]
    lengths = first.lengths + second.lengths
    pairs = [(first.keys, second.keys), (first.values, second.values)]
    if bool((first.lengths == first.keys.shape[2]).all()):
        keys, values = (torch.cat(pair, dim=2) for pair in pairs)
        wide = max(first.positions.shape[1], second.positions.shape[1])
        both = [view.positions.expand(-1, wide, -1).to(torch.int32) for view in (first, second)]
        return RowsView(keys, values, torch.cat(both, dim=2), lengths, columns)
    width = int(lengths.max()) if lengths.numel() else 0
    offset = torch.arange(width)
    behind = offset - first.lengths[..., None] + first.keys.shape[2]
    index = torch.where(offset < first.lengths[..., None], offset, behind)
    absent = (offset >= lengths[..., None]).to(first.keys.device)
    index = index.clamp(max=first.keys.shape[2] + second.keys.shape[2] - 1).to(first.keys.device)

    def packed(pair: tuple[Tensor, Tensor]) -> Tensor:
        both = torch.cat(pair, dim=2)
        return both.gather(2, index[..., None].expand(-1, -1, -1, both.shape[3])).masked_fill(absent[..., None], 0.0)

    positions = torch.cat([view.positions.expand(-1, heads, -1).to(torch.int32) for view in (first, second)], dim=2)
    positions = positions.gather(2, index).masked_fill(absent, -1)
    return RowsView(packed(pairs[0]), packed(pairs[1]), positions, lengths, columns)
