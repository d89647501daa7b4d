"""The rows of one layer while a prompt is blended: a rectangle in which slot i is token i of the prompt.

Reused rows lie where their tokens are; recomputed rows are written over them. A slot without a row (a chunk that was
stored compressed, or the end of a shorter batch row) has position -1 and zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.kernels.attention import flash, halves, scattered, sdpa
from kvfoundry.kernels.attention.span import Span
from kvfoundry.layouts import Layout
from kvfoundry.layouts.base import Reading, RowsView, owned, position_dtype
from kvfoundry.layouts.dense import DenseRows
from kvfoundry.layouts.storing import keep_rows
from kvfoundry.visibility import Visibility

# Queries that are masked at a time: a block reads no key behind its last query, as causality has it. On a GPU a block
# must be large enough to keep it busy.
_BLOCK, _GPU_BLOCK = 64, 512
# Backends whose arithmetic the joined halves stand for.
_SCATTERED = (sdpa.attend, flash.attend)


class WorkingRows:
    """keys, values: [batch, heads, tokens, dim]; positions: [batch, heads or 1, tokens], -1 where there is no row."""

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor, lengths: Tensor, *, whole: bool):
        """lengths: [batch] tokens of each batch row, on the CPU; the tensors are taken over and written into.

        whole: every token has a row in every head.
        """
        self.keys, self.values, self.positions, self.lengths = keys, values, positions, lengths
        self.is_whole = whole
        self._absent = positions < 0

    @classmethod
    def fresh(cls, keys: Tensor, values: Tensor, positions: Tensor, lengths: Tensor, *, whole: bool) -> WorkingRows:
        """Rows of all tokens as they were computed; positions say which of them are stored."""
        groups = max(1, positions.shape[1] // keys.shape[1])
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        if bool((lengths != keys.shape[2]).any()):  # slots behind a shorter batch row hold zeros
            tokens = torch.arange(keys.shape[2], device=keys.device)
            behind = (tokens >= lengths.to(keys.device)[:, None])[:, None, :, None]
            keys, values = keys.masked_fill(behind, 0.0), values.masked_fill(behind, 0.0)
        return cls(owned(keys), owned(values), positions, lengths, whole=whole)

    def write(self, chosen: list[Tensor], keys: Tensor, values: Tensor) -> None:
        """Put fresh rows in the slots of their tokens: visible at once, until `seal` for those that were not stored.

        chosen: token indices of every batch row, ascending, on the device; keys, values: [batch, heads, tokens, dim],
        one column per chosen token, padding behind, in the heads of the model.
        """
        keys, values = (self.for_heads(tensor) for tensor in (keys, values))
        for row, slots in enumerate(chosen):
            self.keys[row].index_copy_(1, slots, keys[row, :, : len(slots)])
            self.values[row].index_copy_(1, slots, values[row, :, : len(slots)])
            if not self.is_whole:
                self.positions[row][:, slots] = slots.to(self.positions.dtype)

    def for_heads(self, rows: Tensor) -> Tensor:
        """Rows of the model's heads for the heads that are kept apart, query heads perhaps."""
        return rows.repeat_interleave(self.keys.shape[1] // rows.shape[1], dim=1)

    def seal(self) -> None:
        """Rows that were absent are absent again: what was recomputed in their slots has been read, and is dropped."""
        if not self.is_whole:
            self.positions.masked_fill_(self._absent, -1)

    def attend(self, query: Tensor, positions: Tensor, span: Span, reading: Reading) -> Tensor:
        """Attention output [batch, query_heads, queries, value_dim] over the rows that every query may see.

        query: [batch, query_heads, queries, head_dim]; positions: [batch, queries] up to which each sees, -1 for
        padding; span: of these positions.
        """
        block = _GPU_BLOCK if query.is_cuda else _BLOCK
        plain = reading.softcap is None and reading.sinks is None and reading.rule.span is None
        if self.is_whole and plain and reading.kernel in _SCATTERED and halves.serves(query, self.keys, self.values):
            visibility = Visibility(positions, self.positions.long(), "masked", reading.rule)
            return scattered.attend(
                query, self.keys, self.values, visibility, span, scaling=reading.scaling, block=block
            )
        outputs = []
        for start in range(0, query.shape[2], block):
            part = slice(start, start + block)
            low, high = span.of(start, start + block)
            low = 0 if reading.rule.span is None else max(0, low - reading.rule.span + 1)
            slots = slice(low, high)
            visibility = Visibility(positions[:, part], self.positions[:, :, slots].long(), "masked", reading.rule)
            outputs.append(
                reading.kernel(
                    query[:, :, part],
                    self.keys[:, :, slots],
                    self.values[:, :, slots],
                    visibility,
                    scaling=reading.scaling,
                    softcap=reading.softcap,
                    sinks=reading.sinks,
                )
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def followed_by(self, keys: Tensor, values: Tensor, positions: Tensor) -> RowsView:
        """These rows with others behind them, for queries that come after the prompt's context; nothing is stored."""
        keys, values = (self.for_heads(tensor) for tensor in (keys, values))
        heads = self.positions.shape[1]
        behind = positions[:, None].expand(-1, heads, -1).to(torch.long)
        joined = torch.cat([self.positions.long(), behind], dim=2)
        lengths = torch.full(keys.shape[:2], joined.shape[2])
        return RowsView(torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2), joined, lengths)

    def stored(self) -> Layout:
        """The layout that a cache goes on with: only the rows that are there."""
        self.seal()
        dtype = position_dtype(self.positions.shape[2])
        positions = self.positions.to(dtype)
        heads = self.keys.shape[1]
        if self.is_whole:
            lengths = self.lengths[:, None].expand(-1, heads).clone()
            return DenseRows(self.keys, self.values, positions, lengths)
        inside = (self.positions >= 0).expand(-1, heads, -1)
        counts = inside.sum(dim=-1)
        width = int(counts.max())
        slots = (~inside).to(torch.uint8).argsort(dim=-1, stable=True)[..., :width]
        beyond = torch.arange(width, device=slots.device) >= counts[..., None]
        view = RowsView(self.keys, self.values, positions, counts.cpu())
        return keep_rows(view, slots.masked_fill(beyond, -1), counts.cpu())
