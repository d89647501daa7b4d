"""Sparse attention of a prompt: the pattern of every head, and one call of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfoundry.checks import whole
from kvfoundry.errors import SpecError
from kvfoundry.kernels import sparse_prefill
from kvfoundry.kernels.sparse_prefill import BlockIndex, Tiles
from kvfoundry.kernels.sparse_prefill.index import merged
from kvfoundry.sparse_prefill.patterns import Pattern, Sight
from kvfoundry.sparse_prefill.table import PatternTable
from kvfoundry.sparse_prefill.work import Work

if TYPE_CHECKING:
    from kvfoundry.layouts.base import Layout, Reading
    from kvfoundry.selection.budgets import ModelShape


@dataclass(frozen=True)
class SparsePrefill:
    """What every head reads of a prompt: `pattern`, unless the table names another for it.

    tile, block: queries and rows of the smallest piece of work.
    """

    pattern: Pattern
    table: PatternTable | None = None
    tile: int = 128
    block: int = 64

    def __post_init__(self) -> None:
        for name, size in (("block", self.block), ("tile", self.tile)):
            whole(name, size, least=1)
            if size & (size - 1):
                raise SpecError(f"{name} must be a power of two, got {size}.")
        if self.tile < self.block:
            raise SpecError(f"a tile of {self.tile} queries must not be smaller than a block of {self.block} rows.")

    def fitted(self, shape: ModelShape) -> SparsePrefill:
        """The same, for one model; SpecError when the table was made for another."""
        if self.table is not None:
            self.table.check(shape)
        return self

    def patterns(self, layer_idx: int, query_heads: int) -> tuple[Pattern, ...]:
        """The pattern of every query head of a layer, counted among the full-attention layers."""
        if self.table is None:
            return (self.pattern,) * query_heads
        return self.table.patterns[layer_idx]

    def attend(
        self,
        rows: Layout,
        query: Tensor,
        positions: Tensor,
        counts: Tensor,
        reading: Reading,
        layer_idx: int,
        work: Work,
    ) -> tuple[Tensor, Work]:
        """Attention of the newest queries over the rows, as `Layout.attend`, and the work so far with this call's.

        counts: [batch] real queries, on the CPU. Where every head reads all that it can see, the layout attends as it
        would without a pattern.
        """
        tiles = Tiles.of(rows.lengths, counts, self.tile, self.block, query.device)
        patterns = self.patterns(layer_idx, query.shape[1])
        causal = tiles.causal * (query.shape[1] // rows.lengths.shape[1])
        if query.shape[2] == 1 or query.is_meta or all(pattern.whole(tiles) for pattern in set(patterns)):
            return rows.attend(query, positions, reading), work.plus(causal, causal)
        view = rows.view()
        sight = Sight(query, view.keys, tiles, reading.scaling, reading.softcap, reading.sinks)
        index = index_of(sight, patterns)
        output = sparse_prefill.attend(
            query,
            view.keys,
            view.values,
            index,
            scaling=reading.scaling,
            softcap=reading.softcap,
            sinks=reading.sinks,
        )
        return output, work.plus(index.computed, index.causal)


@torch.no_grad()
def index_of(sight: Sight, patterns: tuple[Pattern, ...]) -> BlockIndex:
    """What every query head reads, each by its own pattern."""
    kinds: dict[type[Pattern], list[int]] = {}
    for head, pattern in enumerate(patterns):
        kinds.setdefault(type(pattern), []).append(head)
    parts = []
    for kind, own in kinds.items():
        heads = torch.tensor(own, device=sight.query.device)
        parts.append((heads, kind.index(sight, heads, [patterns[head] for head in own])))
    return merged(parts, sight.query_heads)
