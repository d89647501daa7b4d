"""Rows of one layer of a merged pair: older rows from the pair store, the newest whole until their pair is there."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kvfoundry.errors import CacheStateError
from kvfoundry.kernels.running_attention import RunningAttention
from kvfoundry.layouts.base import Columns, Layout, Reading, RowsView, Stretches
from kvfoundry.layouts.dense import DenseRows
from kvfoundry.layouts.pair_store import Half, MergedPair, MiniCachePairStore
from kvfoundry.layouts.parts import joined, take_in, take_in_rows, tiles


class PairedRows(Layout):
    """half: which layer of `pair` (the numbers of the earlier and the later one) this is; fresh: rows not merged yet.

    The merged rows belong to the store. Of what has to be done to them once for both layers (select, truncate) the
    earlier layer takes care, so both layers have to be told, the earlier one first: as a cache does.
    """

    def __init__(self, store: MiniCachePairStore, pair: tuple[int, int], half: Half, fresh: DenseRows):
        self._store, self._pair, self._half, self._fresh = store, pair, half, fresh

    @classmethod
    def merged(cls, store: MiniCachePairStore, pair: tuple[int, int], half: Half) -> PairedRows:
        """All rows in the store, none fresh."""
        merged = store.pair(*pair)
        view, device = merged.directions.view(), merged.device(half)
        keys, values, positions = (
            tensor.to(device).clone()
            for tensor in (view.keys[:, :, :0], view.values[:, :, :0], view.positions[:, :1, :0])
        )
        return cls(store, pair, half, DenseRows(keys, values, positions, view.lengths * 0))

    @property
    def _merged(self) -> MergedPair:
        return self._store.pair(*self._pair)

    @property
    def half(self) -> Half:
        """Which layer of the pair this is."""
        return self._half

    @property
    def merged_pair(self) -> MergedPair:
        """What the store holds for both layers."""
        return self._merged

    @property
    def fresh(self) -> DenseRows:
        """The rows that are not merged yet."""
        return self._fresh

    @property
    def lengths(self) -> Tensor:
        return self._merged.lengths + self._fresh.lengths

    def view(self) -> RowsView:
        """A restored copy: for a look, never on the way of attention."""
        return joined(self._merged.rows(self._half), self._fresh.view(), {})

    def stretches(self) -> Stretches:
        raise CacheStateError("merged rows of a pair of layers are not read by pages.")

    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor | None, last_position: int
    ) -> PairedRows:
        self._fresh = self._fresh.append(keys, values, positions, counts, last_position)
        return self

    def truncated(self, lengths: Tensor) -> PairedRows:
        merged = self._merged
        fresh = self._fresh.truncated((lengths - merged.lengths).clamp(min=0))
        if self._half == "earlier" and bool((lengths < merged.lengths).any()):
            self._store.put(*self._pair, merged.truncated(lengths))
        return PairedRows(self._store, self._pair, self._half, fresh)

    def select_batch(self, indices: Tensor) -> PairedRows:
        if self._half == "earlier":
            self._store.put(*self._pair, self._merged.selected(indices))
        return PairedRows(self._store, self._pair, self._half, self._fresh.select_batch(indices))

    def with_columns(self, columns: Columns) -> PairedRows:
        raise CacheStateError("merged rows of a pair of layers carry no statistics.")

    def with_first_keys(self, keys: Tensor) -> PairedRows:
        raise CacheStateError("merged rows of a pair of layers are not moved to other positions.")

    def expanded_heads(self, groups: int) -> PairedRows:
        raise CacheStateError("merged rows of a pair of layers are kept per stored head.")

    def shared(self) -> PairedRows:
        """Over the same store: a fork of the cache forks the store and moves the layers there, see `in_store`."""
        return PairedRows(self._store, self._pair, self._half, self._fresh.shared())

    def in_store(self, store: MiniCachePairStore) -> PairedRows:
        """The same rows with another store behind them, a fork of the present one."""
        return PairedRows(store, self._pair, self._half, self._fresh)

    def tensors(self) -> Iterator[Tensor]:
        yield from self._fresh.tensors()
        yield from self._merged.tensors(self._half)

    def attend(self, query: Tensor, query_positions: Tensor, reading: Reading) -> Tensor:
        merged = self._merged
        value_dim = merged.directions.stretches().values.shape[1]
        running = RunningAttention(query, value_dim, scaling=reading.scaling, softcap=reading.softcap)
        groups = query.shape[1] // merged.lengths.shape[1]
        for block in merged.directions.blocks():
            for at, tile in tiles(block):
                restored = merged.restored(tile, at.start, self._half)
                take_in(running, restored, query, query_positions, reading, groups)
        take_in_rows(running, self._fresh, query, query_positions, reading)
        return running.output(query.dtype, reading.sinks)
