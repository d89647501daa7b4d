"""The contract of a layout, and the rectangular view of its rows that scores and merges work on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kvfoundry.kernels.attention import AttentionKernel
from kvfoundry.kernels.attention.remembering import Remembering
from kvfoundry.visibility import WHOLE_PAST, Pattern, Visibility, WindowRule

# Statistics that travel with the rows: name -> [batch, heads, rows] per stored head, or [batch, heads, rows, groups]
# with one entry per query head.
Columns = dict[str, Tensor]

# Positions fit in two bytes up to here; they are the only overhead of a row, so narrow ones matter for small heads.
_NARROW_LIMIT = torch.iinfo(torch.int16).max


def position_dtype(last_position: int) -> torch.dtype:
    """The narrowest integer type that holds every position up to `last_position`."""
    return torch.int16 if last_position <= _NARROW_LIMIT else torch.int32


def writable(tensor: Tensor) -> bool:
    """Whether torch lets this mode write into the tensor: one made in inference mode is read-only outside of it."""
    return torch.is_inference_mode_enabled() or not tensor.is_inference()


def split_groups(column: Tensor, groups: int) -> Tensor:
    """A statistics column for `groups` times as many heads: per query head entries become heads, others repeat."""
    if column.dim() == 3:
        return column.repeat_interleave(groups, dim=1)
    batch, heads, rows, _ = column.shape
    return column.transpose(2, 3).reshape(batch, heads * groups, rows, 1)


def joined_groups(column: Tensor, groups: int) -> Tensor:
    """The reverse of `split_groups`: one entry per query head, [batch, heads, rows, groups]."""
    if groups == 1:
        return column
    batch, heads, rows = column.shape[:3]
    return column.reshape(batch, heads // groups, groups, rows).transpose(2, 3).contiguous()


def owned(tensor: Tensor) -> Tensor:
    """The tensor itself when it alone fills its storage in order, else a compact copy."""
    exact = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if exact and tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)


def widened(positions: Tensor, last_position: int) -> Tensor:
    """The positions in a type that also holds `last_position`."""
    fits = positions.dtype != torch.int16 or last_position <= _NARROW_LIMIT
    return positions if fits else positions.to(torch.int32)


def per_head(counts: Tensor, lengths: Tensor) -> Tensor:
    """Counts per batch row, [batch] or already [batch, heads], with the heads of `lengths`."""
    return (counts[:, None] if counts.dim() == 1 else counts).expand_as(lengths)


@dataclass(frozen=True)
class RowsView:
    """Rows as rectangles. Slots at or behind a head's length hold zeros, with position -1.

    keys: [batch, heads, rows, head_dim]; values: [batch, heads, rows, value_dim].
    positions: [batch, heads or 1, rows], token index of each row in its own sequence, padding not counted.
    lengths: [batch, heads] on the CPU.
    columns: statistics per row, [batch, heads, rows, ...].
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    lengths: Tensor
    columns: Columns = field(default_factory=dict)

    @property
    def head_positions(self) -> Tensor:
        """Positions with the head dimension expanded: [batch, heads, rows]."""
        return self.positions.expand(-1, self.keys.shape[1], -1)

    @property
    def valid(self) -> Tensor:
        """Boolean [batch, heads, rows]: True where a head really has a row."""
        return self.head_positions >= 0


class Slots(Protocol):
    """Rows of all heads in one buffer [slots, dim], picked by slot number: a tensor, or rows that are decoded then.

    Slots are asked for head by head: [batch, heads, n], heads a multiple of the stored ones.
    """

    @property
    def shape(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...

    def __getitem__(self, slots: Any, /) -> Tensor: ...

    def new_zeros(self, *shape: Any) -> Tensor: ...


@dataclass(frozen=True)
class Stretches:
    """The rows in place: every head owns a stretch of flat buffers.

    keys, values: [slots, dim]. starts: [batch, heads] first slot of each head; lengths: [batch, heads] its rows, on the
    CPU.
    """

    keys: Slots
    values: Slots
    starts: Tensor
    lengths: Tensor

    def upto(self, lengths: Tensor) -> Stretches:
        """The first `lengths` rows of every head."""
        return replace(self, lengths=lengths)


@dataclass(frozen=True)
class Block:
    """Rows of some heads of some batch rows as rectangles, in place.

    keys, values: [batch, heads, rows, dim] and positions: [batch, heads or 1, rows] of the batch rows and heads that
    the slices name; complete: none of these heads has padding behind its rows.
    """

    batch: slice
    heads: slice
    keys: Tensor
    values: Tensor
    positions: Tensor
    complete: bool

    def query_heads(self, groups: int) -> slice:
        """The query heads that read these heads, `groups` of them each."""
        if self.heads == slice(None):
            return self.heads
        return slice(self.heads.start * groups, self.heads.stop * groups)


class Layout(ABC):
    """Rows of one layer for every batch row and head. Rows are stored in ascending position order.

    coded: a codec wrote them; new rows wait whole until `flushed`.
    """

    coded = False

    @property
    @abstractmethod
    def lengths(self) -> Tensor:
        """Rows per batch row and head: [batch, heads], on the CPU."""

    @abstractmethod
    def view(self) -> RowsView:
        """The rows as rectangles: no copy for a dense layout, a padded copy for a ragged one."""

    def coded_span(self) -> tuple[int, int]:
        """First and last slot (exclusive) of the rows that a codec wrote in every head alike; empty without one."""
        return 0, 0

    def coded_keys(self, start: int, stop: int, view: RowsView) -> Tensor:
        """Keys of such slots as attention reads them: [batch, heads, stop - start, head_dim].

        view: the rows before they were written.
        """
        return view.keys[:, :, start:stop]

    @abstractmethod
    def stretches(self) -> Stretches:
        """The rows in place, without a copy."""

    @abstractmethod
    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor | None, last_position: int
    ) -> Layout:
        """Store new rows behind the old ones and return the layout that now holds them.

        keys, values: [batch, heads, tokens, dim], real tokens first; positions: [batch, tokens], or [batch, heads or 1,
        tokens] where heads take different ones, -1 behind the real ones. counts: real tokens per batch row, [batch] or
        [batch, heads], on the CPU; None when all are real. last_position: the largest of positions.
        """

    def kept(self, view: RowsView, slots: Tensor, counts: Tensor) -> Layout:
        """The rows `slots` of every head, [batch, heads, width] ascending and -1 behind, in memory of their own.

        view: the rows, as merging may have changed them. counts: [batch, heads] slots of each head, on the CPU.
        """
        from kvfoundry.layouts.storing import keep_rows

        return keep_rows(view, slots, counts)

    def flushed(self) -> Layout:
        """The rows with everything encoded that is due; called after attention, so a token is read whole once."""
        return self

    @abstractmethod
    def truncated(self, lengths: Tensor) -> Layout:
        """The first `lengths` rows of every head ([batch, heads], on the CPU)."""

    @abstractmethod
    def select_batch(self, indices: Tensor) -> Layout:
        """The batch rows `indices`, in that order, repeats allowed; owns its memory."""

    @abstractmethod
    def with_columns(self, columns: Columns) -> Layout:
        """The same rows with these statistics ([batch, heads, rows, ...] rectangles as in `view`)."""

    @abstractmethod
    def with_first_keys(self, keys: Tensor) -> Layout:
        """The same rows with the keys of the first slots exchanged: [batch, heads, slots, head_dim]."""

    @abstractmethod
    def expanded_heads(self, groups: int) -> Layout:
        """Every head repeated `groups` times, for methods that keep one set per query head."""

    @abstractmethod
    def shared(self) -> Layout:
        """A second layout over the same memory; whichever of the two writes first takes a copy."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that holds memory for the rows."""

    @abstractmethod
    def attend(self, query: Tensor, query_positions: Tensor, reading: Reading) -> Tensor:
        """Attention of the newest queries over the rows: [batch, query_heads, queries, value_dim].

        query: [batch, query_heads, queries, head_dim]; query_positions: [batch, queries], -1 for padding.
        The rows of these queries are the newest ones of every head.
        """


@dataclass(frozen=True)
class Reading:
    """How one attention call reads: the kernel, and the terms that the model adds to the logits."""

    kernel: AttentionKernel
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    rule: WindowRule = WHOLE_PAST
    unread_distance: int | None = None

    def lse_of(self, query: Tensor) -> Tensor | None:
        """Log-sum-exp of these queries' logits, base 2: [batch, query_heads, queries]; None where nobody kept it."""
        kernel = self.kernel
        return kernel.lse if isinstance(kernel, Remembering) and kernel.query is query else None

    def visibility(
        self, query_positions: Tensor, key_positions: Tensor, *, own: bool, complete: bool, behind: bool = False
    ) -> Visibility:
        """The mask of one call, in its cheapest form.

        own: the rows are exactly the queries' own tokens. complete: no head has padding behind its rows. behind: no
        query is padding, and their own tokens are the last rows of every head.
        """
        queries, rows = query_positions.shape[1], key_positions.shape[2]
        reaches_all = self.rule.span is None or rows <= self.rule.span
        pattern: Pattern
        if self.rule.chunked is not None or self.unread_distance is not None:
            pattern = "masked"
        elif own and reaches_all and queries > 1:
            pattern = "causal"
        elif queries == 1 and complete and self.rule.span is None:
            pattern = "full"
        elif behind and complete and self.rule.span is None:
            pattern = "behind"
        else:
            pattern = "masked"
        return Visibility(query_positions, key_positions, pattern, self.rule, self.unread_distance)
