"""What a score may look at: the queries of this call, and every row they could see."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from kvfoundry.devices import carried
from kvfoundry.kernels.attention.naive import attention_weights
from kvfoundry.kernels.column_sums import column_sums
from kvfoundry.layouts.base import Reading, RowsView
from kvfoundry.rope import Rope
from kvfoundry.visibility import Visibility

Group = Literal["mean", "max", "sum"]
Granularity = Literal["kv_head", "query_head"]

# What a score remembers of a sequence beside its rows: name -> [batch, ...].
Summary = dict[str, Tensor]

# What several methods that look at one call of one layer need not compute twice: key -> (query of the call, result).
Memo = dict[Hashable, tuple[Tensor, Any]]

Found = TypeVar("Found")


@dataclass(frozen=True)
class Evidence:
    """Inputs of a score for one layer.

    query: [batch, query_heads, queries, head_dim] of this call, real tokens first; query_positions: [batch, queries].
    window_query, window_positions: the last queries of the sequence, as many as the score's `window`, earlier calls
        included; positions are -1 where a sequence is shorter.
    rows: the stored rows, the newest included. reading: scaling, soft-cap, sinks and window rule of the model.
    own: the rows are exactly the queries' tokens (a prompt in one piece).
    seen: real tokens per batch row so far, on the CPU. layer_idx, num_layers: place among the layers that evict.
    rope: the layer's rotary embedding when the score asks for it. module: the model's attention module, None when the
        tensors were fed by hand.
    summary: what the score's `summary` returned for this call. decoding: this call comes after the prompt.
    memo: shared by the methods that look at this very call, None for a single one and for rows of a method's own.
    """

    query: Tensor
    query_positions: Tensor
    window_query: Tensor
    window_positions: Tensor
    rows: RowsView
    reading: Reading
    own: bool
    seen: Tensor
    layer_idx: int
    num_layers: int
    group: Group = "mean"
    rope: Rope | None = None
    module: nn.Module | None = None
    granularity: Granularity = "kv_head"
    summary: Summary = field(default_factory=dict)
    decoding: bool = False
    memo: Memo | None = None

    def once(self, key: Hashable, compute: Callable[[], Found]) -> Found:
        """What `compute` returns, from the memo where a method with the same key was here before.

        The key names what is computed and everything in which methods may differ; results are never written to.
        """
        if self.memo is None:
            return compute()
        whole = (key, id(self.query))
        if whole not in self.memo:
            self.memo[whole] = self.query, compute()  # with its query, so that no other takes its id
        found: Found = self.memo[whole][1]
        return found

    @property
    def groups(self) -> int:
        """Query heads per stored head."""
        return self.query.shape[1] // self.rows.keys.shape[1]

    def reduced(self, per_query_head: Tensor) -> Tensor:
        """[batch, query_heads, ...] to [batch, heads, ...] by the group reduction of the method."""
        batch, query_heads = per_query_head.shape[:2]
        grouped = per_query_head.view(batch, query_heads // self.groups, self.groups, *per_query_head.shape[2:])
        if self.group == "max":
            return grouped.amax(dim=2)
        return grouped.mean(dim=2) if self.group == "mean" else grouped.sum(dim=2)

    @cached_property
    def window_attention(self) -> Tensor:
        """Softmax weights of the window queries over all rows: [batch, query_heads, window, rows], float32.

        Exactly the model's own attention (scaling, soft-cap, sinks, causality). Queries that are padding weigh nothing.
        """
        return self.once(("window_attention", self.window_positions.shape[1]), self._window_attention)

    def _window_attention(self) -> Tensor:
        weights = attention_weights(
            self.window_query,
            self.rows.keys,
            self._seen_by_window.block(0, self.window_positions.shape[1]),
            scaling=self.reading.scaling,
            softcap=self.reading.softcap,
            sinks=self.reading.sinks,
        )
        return weights * (self.window_positions >= 0)[:, None, :, None]

    @cached_property
    def window_sums(self) -> Tensor:
        """`window_attention` summed over its queries: [batch, query_heads, rows], float32."""
        return self.once(("window_sums", self.window_positions.shape[1]), self._window_sums)

    def _window_sums(self) -> Tensor:
        return column_sums(
            self.window_query,
            self.rows.keys,
            self._seen_by_window,
            scaling=self.reading.scaling,
            softcap=self.reading.softcap,
            sinks=self.reading.sinks,
        )

    @property
    def _seen_by_window(self) -> Visibility:
        return Visibility(
            self.window_positions,
            self.rows.positions,
            "masked",
            self.reading.rule,
            self.reading.unread_distance,
        )

    @cached_property
    def newest_attention(self) -> Tensor:
        """Softmax weights of each sequence's newest query of this call over all rows: [batch, query_heads, rows]."""
        return self.once("newest_attention", self._newest_attention)

    def _newest_attention(self) -> Tensor:
        newest = (self.query_positions >= 0).sum(dim=1, keepdim=True).clamp(min=1) - 1
        index = newest[:, None, :, None].expand(-1, self.query.shape[1], -1, self.query.shape[3])
        visibility = self.reading.visibility(
            self.query_positions.gather(1, newest), self.rows.positions, own=False, complete=False
        )
        return attention_weights(
            self.query.gather(2, index),
            self.rows.keys,
            visibility.block(0, 1),
            scaling=self.reading.scaling,
            softcap=self.reading.softcap,
            sinks=self.reading.sinks,
        )[:, :, 0]

    @cached_property
    def column_sums(self) -> Tensor:
        """Attention mass that this call's queries spent on every row: [batch, query_heads, rows], float32."""
        return self.once("column_sums", self._column_sums)

    def _column_sums(self) -> Tensor:
        visibility = self.reading.visibility(
            self.query_positions, self.rows.positions, own=self.own, complete=bool(self.rows.valid.all())
        )
        return column_sums(
            self.query,
            self.rows.keys,
            visibility,
            scaling=self.reading.scaling,
            softcap=self.reading.softcap,
            sinks=self.reading.sinks,
            lse=self.reading.lse_of(self.query),
        )

    def ages(self) -> Tensor:
        """Distance of every row from the end of its sequence, 1 for the newest: [batch, heads, rows]."""
        seen = carried(self.seen, self.rows.keys.device)[:, None, None]
        return seen - self.rows.head_positions.to(torch.int64)
