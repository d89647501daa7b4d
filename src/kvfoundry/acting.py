"""What a method does with one layer after each call: observe, and drop rows when its schedule says so.

A `Method` has no state; what it has to remember between calls of one layer lives here, inside the cache.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from kvfoundry.columns import newest
from kvfoundry.errors import CacheStateError
from kvfoundry.layouts import Layout
from kvfoundry.layouts.base import Columns, Reading, RowsView
from kvfoundry.layouts.parked import ParkedRows
from kvfoundry.method import Method
from kvfoundry.rope import Rope
from kvfoundry.selection.evict import evict
from kvfoundry.selection.evidence import Evidence, Memo, Summary
from kvfoundry.slots import Sinks


@dataclass(frozen=True)
class Turn:
    """One call of a layer, after it has stored its rows and attended.

    query, positions: real tokens first, as in `Evidence`. real: [batch] real tokens so far, on the CPU. place: index
    among the layers that evict, and their number. own: the rows are exactly this call's tokens. columns: tokens of the
    call, padding included. memo: shared with other methods that look at the same call.
    """

    query: Tensor
    positions: Tensor
    reading: Reading
    module: nn.Module | None
    real: Tensor
    place: tuple[int, int]
    own: bool
    columns: int
    in_prompt: bool
    prompt_ends: bool
    memo: Memo | None = None


class Acting:
    """The memory of one method on one layer: budget in force, remembered queries, running statistics, sinks.

    parked: the rows that the method dropped and did not give up, on the host.
    """

    def __init__(self, method: Method, rope: Rope | None):
        self.method, self.rope = method, rope
        self.parked = ParkedRows()
        self._budget: Tensor | None = None
        self._since_eviction = 0
        self._window: tuple[Tensor, Tensor] | None = None
        self._summary: Summary = {}
        self._sinks: Sinks | None = None

    @property
    def budget(self) -> Tensor | None:
        """Rows per head in force, [batch] on the CPU, as the prompt has set it."""
        return self._budget

    def grant(self, rows: Tensor) -> None:
        """A budget, [batch] rows per head on the CPU, for rows that no prompt of this cache has brought."""
        self._budget = rows

    def after(self, turn: Turn, rows: Layout) -> tuple[Layout, bool]:
        """The rows that stay after this call, and whether any were dropped."""
        method, schedule = self.method, self.method.schedule
        assert method.score is not None and method.budget is not None
        acts_later = schedule.every is not None or not turn.prompt_ends
        if turn.in_prompt:
            due = schedule.prefill == "chunk" or (schedule.prefill == "end" and turn.prompt_ends)
            self._budget = method.budget.rows(turn.real, *turn.place)
        elif schedule.every is None:
            return rows, False
        else:
            self._since_eviction += turn.columns
            due = self._since_eviction >= schedule.every
        rows, evidence = self._observed(turn, rows)
        kept = self._evicted(turn, rows, evidence) if due else rows
        dropped = kept is not rows
        if not acts_later:
            self._window, self._summary = None, {}
            kept, self.parked = kept.with_columns({}), self.parked.without_columns()
        return kept, dropped

    def noted(self, turn: Turn, rows: Layout) -> Layout:
        """The rows with what the method remembers of this call; nothing is dropped."""
        return self._observed(turn, rows)[0]

    def _observed(self, turn: Turn, rows: Layout) -> tuple[Layout, Evidence]:
        """Remember the queries of a call and bring the statistics up to date."""
        method = self.method
        assert method.score is not None
        self._remember_window(turn)
        evidence = self._evidence(turn, rows)
        observers = [axis for axis in (method.score, method.dispose) if axis is not None and axis.accumulates]
        if observers:
            columns: Columns = {}
            for axis in observers:
                key = "observed", axis, method.granularity, method.group
                columns |= evidence.once(key, partial(axis.observe, evidence))
            rows = rows.with_columns(columns)
            key = "summary", method.score, method.granularity, method.group
            self._summary = evidence.once(key, partial(method.score.summary, evidence, self._summary))
            evidence = replace(evidence, rows=replace(evidence.rows, columns=columns), summary=self._summary)
        return rows, evidence

    def evicted(self, method: Method, rows: Layout, evidence: Evidence, budget: Tensor) -> Layout:
        """The rows that stay within `budget` ([batch] rows per head on average), now; the others are parked or gone."""
        return evict(method, rows, evidence, budget, self._park)

    def _park(self, view: RowsView, leaving: Tensor, counts: Tensor) -> None:
        self.parked = self.parked.joined_by(view, leaving, counts)

    def recalled(self, rows: Layout, real: Tensor, heads: int, *, acts_again: bool) -> Layout:
        """The rows with every parked one back in its place, as `ParkedRows.reunited`.

        acts_again: the method goes on with what it remembers; otherwise that is forgotten too.
        """
        if self.parked.parcels:
            rows = self.parked.reunited(rows, real, heads, columns=acts_again)
        self.parked = ParkedRows()
        if not acts_again:
            self._since_eviction, self._window, self._summary = 0, None, {}
            rows = rows.with_columns({})
        return rows

    def _evidence(self, turn: Turn, rows: Layout) -> Evidence:
        window_query, window_positions = self._window if self._window is not None else (turn.query, turn.positions)
        layer_idx, num_layers = turn.place
        return Evidence(
            query=turn.query,
            query_positions=turn.positions,
            window_query=window_query,
            window_positions=window_positions,
            rows=rows.view(),
            reading=turn.reading,
            own=turn.own,
            seen=turn.real,
            layer_idx=layer_idx,
            num_layers=num_layers,
            group=self.method.group,
            rope=self.rope,
            module=turn.module,
            granularity=self.method.granularity,
            decoding=not turn.in_prompt,
            memo=turn.memo,
        )

    def _evicted(self, turn: Turn, rows: Layout, evidence: Evidence) -> Layout:
        self._since_eviction = 0
        schedule, budget = self.method.schedule, self._budget
        if not turn.in_prompt and schedule.cap is not None:
            budget = torch.full_like(turn.real, schedule.cap)
        assert budget is not None
        kept = self.evicted(self.method, rows, evidence, budget)
        if kept is rows or not self.method.slot_positions:
            return kept
        return self._take_sinks(rows, turn.real).moved_into(kept, turn.real)

    def _take_sinks(self, rows: Layout, real: Tensor) -> Sinks:
        """Before the first row of a sequence goes, set its sinks aside as they were computed."""
        if self.rope is None:
            raise CacheStateError(
                f"{self.method}: slot positions need the model's RoPE; use it through KVCache(model)."
            )
        if self._sinks is None:
            self._sinks = Sinks.taken_from(rows, self.method.protect.sinks, self.rope)
        else:
            self._sinks = self._sinks.renewed(rows, real)
        return self._sinks

    def _remember_window(self, turn: Turn) -> None:
        """Hold the last queries of every sequence, as many as the score asks for."""
        assert self.method.score is not None
        size = self.method.score.window
        if size == 0:
            self._window = None
            return
        query, positions = turn.query, turn.positions
        if self._window is not None:
            query = torch.cat([self._window[0], query], dim=2)
            positions = torch.cat([self._window[1], positions], dim=1)
        self._window = newest(query, positions, size)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that is remembered on the device."""
        if self._window is not None:
            yield from self._window
        if self._sinks is not None:
            yield self._sinks.keys
        yield from self._summary.values()

    def copied(self) -> Acting:
        """The same memory for a fork: nothing in it is ever written in place, parked rows least of all."""
        return copy.copy(self)

    @classmethod
    def joined(cls, parts: Sequence[Acting]) -> Acting:
        """The memory of several batches, one after the other, that one recipe has acted on under any budgets.

        Neither parked rows nor slot positions can be joined.
        """
        first = parts[0]
        result = copy.copy(first)
        if first._budget is not None:
            result._budget = torch.cat([part._budget for part in parts if part._budget is not None])
        if first._window is not None:
            windows = [part._window for part in parts if part._window is not None]
            query, positions = (torch.cat(tensors) for tensors in zip(*windows, strict=True))
            result._window = query, positions
        result._summary = {name: torch.cat([part._summary[name] for part in parts]) for name in first._summary}
        return result

    def selected(self, indices: Tensor) -> Acting:
        """The memory of the batch rows `indices`."""
        result = copy.copy(self)
        result.parked = self.parked.selected(indices)
        result._budget = None if self._budget is None else self._budget[indices.cpu()]
        result._sinks = None if self._sinks is None else self._sinks.selected(indices)
        result._summary = {name: value[indices.to(value.device)] for name, value in self._summary.items()}
        if self._window is not None:
            on_device = indices.to(self._window[0].device)
            result._window = (self._window[0][on_device], self._window[1][on_device])
        return result
