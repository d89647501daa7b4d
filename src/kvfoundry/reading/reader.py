"""The contract of a reader, and the one that reads pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvfoundry.kernels import paged_attention
from kvfoundry.layouts.base import Layout, Reading, Stretches
from kvfoundry.reading import chosen
from kvfoundry.reading.pages import (
    evaluation_pages,
    factory_tokens,
    kernel_pages,
    last_page_bounds,
    page_scores,
    with_last_page,
)
from kvfoundry.reading.state import PageState
from kvfoundry.selection.budgets import Amount, resolved
from kvfoundry.selection.evidence import Granularity, Group

Rule = Literal["kernel", "evaluation", "tokens"]


class Reader(ABC):
    """Decides which stored rows a decode step reads. Frozen; what it has to remember lives in the layer."""

    skip_layers: int

    @abstractmethod
    def budget_rows(self, seen: Tensor) -> Tensor:
        """[batch] rows to read, given the real tokens of the prompt [batch]."""

    @abstractmethod
    def attend(
        self,
        rows: Layout,
        query: Tensor,
        query_positions: Tensor,
        reading: Reading,
        state: PageState | None,
        budget: Tensor,
        granularity: Granularity,
    ) -> tuple[Tensor, PageState | None]:
        """Output like `Layout.attend`, and the state for the next call.

        state: None when the rows are not known yet. budget: [batch]. granularity: that of the stored rows; where every
        query head may come to have rows of its own, it chooses for itself from the start.
        """


@dataclass(frozen=True)
class PageReader(Reader):
    """Reads the pages that promise most, one table per stored head ("kv_head") or per query head.

    group: how the query heads that share a stored head agree on its pages.
    """

    budget: Amount
    page: int = 16
    skip_layers: int = 2
    rule: Rule = "kernel"
    recent: int = 16
    granularity: Granularity = "kv_head"
    group: Group = "max"

    def budget_rows(self, seen: Tensor) -> Tensor:
        return resolved(self.budget, seen)

    def attend(
        self,
        rows: Layout,
        query: Tensor,
        query_positions: Tensor,
        reading: Reading,
        state: PageState | None,
        budget: Tensor,
        granularity: Granularity,
    ) -> tuple[Tensor, PageState | None]:
        if granularity == "query_head" and self.granularity == "kv_head":
            own = replace(self, granularity="query_head")
            return own.attend(rows, query, query_positions, reading, state, budget, granularity)
        if bool((rows.lengths <= budget[:, None]).all()):
            return rows.attend(query, query_positions, reading), state
        stretches = rows.stretches()
        state = state or PageState.empty(self.page, stretches)
        state.extend(stretches)
        if chosen.serves(self, stretches, query, budget):
            return chosen.attend(self, stretches, query, reading, state, int(budget[0])), state
        real = query_positions >= 0
        lengths = stretches.lengths
        later = (real.sum(dim=1, keepdim=True) - real.cumsum(dim=1)).cpu()  # real queries behind each one
        # One query after the other, each over the rows that were there when it came: as if it had been fed alone.
        outputs = [
            self._attend_one(
                query[:, :, i],
                real[:, i],
                stretches.upto(lengths - later[:, i : i + 1]),
                reading,
                state,
                budget,
            )
            for i in range(query.shape[2])
        ]
        return torch.stack(outputs, dim=2), state

    def _attend_one(
        self, query: Tensor, real: Tensor, rows: Stretches, reading: Reading, state: PageState, budget: Tensor
    ) -> Tensor:
        """Output [batch, query_heads, value_dim] of one query per sequence over the pages chosen for it."""
        budget = budget.to(query.device)[:, None]
        table, page = self._table(query, rows, state, budget)
        starts, lengths = rows.starts, rows.lengths.to(query.device)
        if self.granularity == "query_head":
            groups = query.shape[1] // starts.shape[1]
            starts, lengths = (tensor.repeat_interleave(groups, dim=1) for tensor in (starts, lengths))
        return paged_attention.attend(
            query,
            rows.keys,
            rows.values,
            table,
            starts,
            lengths,
            page,
            real,
            scaling=reading.scaling,
            softcap=reading.softcap,
            sinks=reading.sinks,
        )

    def _table(self, query: Tensor, rows: Stretches, state: PageState, budget: Tensor) -> tuple[Tensor, int]:
        """The table of pages to read and the rows of one page; slots are pages of one row."""
        lengths = rows.lengths.to(query.device)
        groups = query.shape[1] // lengths.shape[1] if self.granularity == "query_head" else 1
        if self.rule == "tokens":
            newest = torch.minimum(budget, lengths).clamp(max=self.recent)
            scores = self._scores(query, rows.upto(rows.lengths - newest.cpu()), state, partial=True)
            lengths = lengths.repeat_interleave(groups, dim=1)
            return factory_tokens(scores, lengths, budget, page=self.page, recent=self.recent), 1
        scores = self._scores(query, rows, state, partial=self.rule == "evaluation")
        lengths = lengths.repeat_interleave(groups, dim=1)
        counts = -(-lengths // self.page)
        # A budget that covers all rows reads all pages, also where it is no multiple of the page.
        pages = torch.where(lengths <= budget, counts, (budget // self.page).clamp(min=1))
        choose = evaluation_pages if self.rule == "evaluation" else kernel_pages
        return choose(scores, counts, pages), self.page

    def _scores(self, query: Tensor, rows: Stretches, state: PageState, *, partial: bool) -> Tensor:
        """[batch, heads, pages]: what every page promises; the partly filled one only when asked for, else 0."""
        whole = (rows.lengths // self.page).to(query.device)
        pages = int((-(-rows.lengths // self.page)).max())
        low, high = (bounds[:, :, :pages] for bounds in (state.low, state.high))
        if partial:
            last = last_page_bounds(rows.keys, rows.starts, rows.lengths.to(query.device), self.page)
            low, high = (with_last_page(bounds, end, whole) for bounds, end in zip((low, high), last, strict=True))
        missing = pages - low.shape[2]
        scores = torch.nn.functional.pad(page_scores(query, low, high), (0, max(0, missing)))[..., :pages]
        groups = query.shape[1] // rows.lengths.shape[1]
        if self.granularity == "query_head" or groups == 1:
            return scores
        grouped = scores.unflatten(1, (-1, groups))
        if self.group == "max":
            return grouped.amax(dim=2)
        return grouped.mean(dim=2) if self.group == "mean" else grouped.sum(dim=2)
