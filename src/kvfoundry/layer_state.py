"""What one layer of the cache holds, and all that is done to it between calls: bytes, crop, reorder, recall, fork.

How a call fills it is in `layer.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvfoundry.acting import Acting
from kvfoundry.codecs.base import RowsCodec
from kvfoundry.coding import Coding
from kvfoundry.errors import CacheStateError, SpecError
from kvfoundry.kernels.attention import AttentionKernel, backend
from kvfoundry.layouts import DenseRows, Layout, RowsView
from kvfoundry.layouts.base import Reading
from kvfoundry.layouts.joined import JoinedRows
from kvfoundry.method import Method
from kvfoundry.pairing import LayerPair
from kvfoundry.prompt import Prompt
from kvfoundry.reading.state import PageState
from kvfoundry.rope import Rope
from kvfoundry.tensor_refusal import RefusesTensorUse
from kvfoundry.travelling import TravellingKey
from kvfoundry.visibility import WHOLE_PAST, WindowRule

# A window layer keeps this many tokens more than its window, so that speculative decoding can take tokens back.
ROLLBACK = 64


class LayerState(RefusesTensorUse, TravellingKey, CacheLayerMixin):
    """Rows of one attention layer, and what its method remembers; see `CacheLayer`."""

    is_compileable = False
    supports_early_init = False

    def __init__(
        self,
        method: Method,
        *,
        layer_idx: int = 0,
        num_layers: int = 1,
        rule: WindowRule = WHOLE_PAST,
        kernel: AttentionKernel | None = None,
        family: str = "the model",
        prompt: Prompt | None = None,
        rope: Rope | None = None,
    ):
        self.method = method
        self.layer_idx, self.num_layers = layer_idx, num_layers
        self.rule = rule
        self.kernel = kernel or backend("sdpa")
        self.family = family
        self.prompt = prompt or Prompt()
        self.rope = rope
        # Called in place of eviction while set; the rows of such a call are read and then forgotten.
        self.watch: Callable[[Any, Tensor, Tensor, Reading, nn.Module | None], None] | None = None
        self.pair: LayerPair | None = None  # set by the cache where the method merges two layers
        self.sums_for_others = False  # methods that look on ask for column sums
        self.keeps_whole_window = False  # a window layer keeps every row, for a text that is to be read in other places
        self._noted = 0
        self._clear()

    def _clear(self) -> None:
        self.rows: Layout | None = None
        self._heads = 0  # that the model stores; a method may keep one set of rows per query head
        self.seen = 0  # columns, padding included
        self.real: Tensor | None = None  # [batch] real tokens, on the CPU
        self._longest = 0  # the largest of them
        self._padded_to = 0  # columns up to which some batch row is padding
        self.rows_lost_at = 0  # columns seen when rows were last dropped
        self.rests = False  # since a recall: the method drops nothing
        self._acting = Acting(self.method, self.rope)
        coded = self.method.codec is not None and self.rule.span is None
        self._coding = Coding(self.method, self.layer_idx, self.num_layers, self.family, self.rope) if coded else None
        self._pages: PageState | None = None
        self._read_budget: Tensor | None = None
        self.reconstructed = False
        self._pending: tuple[Tensor, Tensor] | None = None
        self._halfway = False  # inside `attend`, or thrown out of it
        self.is_initialized = False
        self.note_bytes()

    @property
    def is_sliding(self) -> bool:
        """Whether transformers should build the window mask from this layer."""
        return self.rule.span is not None

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether tokens can always be taken back; false as soon as the method may drop rows."""
        return not self.acts

    @property
    def evicts(self) -> bool:
        """Whether the method drops rows of this layer."""
        return self.rule.span is None and self.method.acts_on(self.layer_idx)

    @property
    def acts(self) -> bool:
        """Whether it may drop some at the next call: since a recall it rests, unless told to act again."""
        return self.evicts and not self.rests

    @property
    def sums_columns(self) -> bool:
        """Whether somebody will ask what the queries of a prompt gave to every row."""
        score = self.method.score
        return self.sums_for_others or (self.acts and score is not None and score.sums_columns)

    def get_seq_length(self) -> int:
        """Columns seen: positions go on from here, whatever is stored."""
        return self.seen

    def join(self, parts: Sequence[LayerState]) -> None:
        """Begin, while empty, with the batch rows of layers that have seen the same prompt, one after the other.

        The parts are of the same place in the model, and what their methods do from now on is what this one does.
        """
        assert self.rows is None
        first, layouts, real = parts[0], [], []
        for part in parts:
            assert part.rows is not None and part.real is not None
            layouts.append(part.rows)
            real.append(part.real)
        self.rows, self.real = JoinedRows.of(layouts), torch.cat(real)
        self._heads, self.seen, self._padded_to, self._longest = (
            first._heads, first.seen, first._padded_to, first._longest,
        )  # fmt: skip
        self.rows_lost_at = max(part.rows_lost_at for part in parts)
        self.is_initialized = True
        if self.acts:
            self._acting = Acting.joined([part._acting for part in parts])
        self.note_bytes()

    @property
    def is_interrupted(self) -> bool:
        """Whether a call ended in an exception after rows were stored: only `reset` leads on from there."""
        return self._halfway or self._pending is not None

    def note_bytes(self) -> None:
        """Report to the cache what this layer holds now."""
        held = self.nbytes
        self.prompt.note(held - self._noted)
        self._noted = held

    def budget_rows(self) -> Tensor:
        """Rows per head that the method grants for the tokens seen: [batch], on the CPU."""
        assert self.method.budget is not None and self.real is not None
        return self.method.budget.rows(self.real, self.layer_idx, self.num_layers)

    def exceeds_budget(self) -> bool:
        """Whether any head stores more rows than the method grants."""
        return self.rows is not None and bool((self.rows.lengths > self.budget_rows()[:, None]).any())

    def _leave_window(self, columns: int) -> None:
        """Drop rows that no later query can reach, with room for a rollback of the newest tokens."""
        assert self.rows is not None and self.rule.span is not None
        reserve = self.rule.span - 1 + ROLLBACK
        lengths = self.rows.lengths
        if int(lengths.max()) <= self.rule.span - 1 + 2 * ROLLBACK and columns == 1:
            return  # decode trims in strides, not at every token
        if int(lengths.max()) <= reserve:
            return
        self.rows = self._newest(lengths.clamp(max=reserve))

    def _newest(self, counts: Tensor) -> DenseRows:
        """The newest rows of every head in memory of their own; counts: [batch, heads], on the CPU."""
        assert self.rows is not None
        view = self.rows.view()
        offset = torch.arange(int(counts.max()))
        slots = (self.rows.lengths - counts)[..., None] + offset
        slots = slots.masked_fill(offset >= counts[..., None], -1).to(view.keys.device)
        return DenseRows.gathered(view, slots, counts)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that this layer keeps alive, without what it has parked on the host."""
        return storage_bytes(self.tensors())

    @property
    def parked_nbytes(self) -> int:
        """Bytes of the host storages of parked rows."""
        return storage_bytes(self.parked_tensors())

    @property
    def parked(self) -> RowsView | None:
        """The rows that the method parked, as rectangles on the host in token order: keys, values, positions, lengths.

        A copy, for a look; None while there are none.
        """
        return self._acting.parked.view()

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor behind the layer: rows, positions, statistics, remembered queries."""
        if self.rows is not None:
            yield from self.rows.tensors()
        yield from self._acting.tensors()
        if self._coding is not None:
            yield from self._coding.tensors()
        if self._pages is not None:
            yield from self._pages.tensors()

    def parked_tensors(self) -> Iterator[Tensor]:
        """Every tensor on the host that holds parked rows."""
        yield from self._acting.parked.tensors()

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """Stored keys as a rectangle [batch, heads, rows, head_dim], zeros where a ragged head has no row."""
        return None if self.rows is None else self.rows.view().keys

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """Stored values, like `keys`."""
        return None if self.rows is None else self.rows.view().values

    @property
    def positions(self) -> Tensor:
        """Token index of every row in its own sequence: [batch, heads, rows], -1 where a ragged head has no row."""
        if self.rows is None:
            return torch.empty(0, 0, 0, dtype=torch.long)
        return self.rows.view().head_positions.to(torch.long)

    @property
    def lengths(self) -> Tensor:
        """Rows per batch row and head: [batch, heads]."""
        return torch.empty(0, 0, dtype=torch.long) if self.rows is None else self.rows.lengths

    @property
    def batch_size(self) -> int:
        """Batch rows; AttributeError before the first call, as transformers expects."""
        if self.real is None:
            raise AttributeError("batch_size is not known before the first call")
        return self.real.shape[0]

    def reset(self) -> None:
        """Back to an empty layer; the memory is freed."""
        self._clear()
        if self.pair is not None:
            self.pair.clear()

    @torch.no_grad()
    def recall(self, *, act_again: bool = False) -> None:
        """Bring the parked rows of this layer back, as `KVCache.recall` does for all of them."""
        if not self.method.parks:
            raise SpecError(
                f"{self.method} parks no rows, so none can be recalled; where it drops some, +park() keeps them."
            )
        if act_again and self.method.reconstructs is not None:
            raise SpecError(
                f"{self.method} cannot choose by a new prompt alone: it repeats the whole context. Call recall(), then "
                "kvfoundry.compress_by_reconstruction with the ids of all that the cache has seen."
            )
        if self.rows is None:
            return
        assert self.real is not None
        if self.evicts:
            self.rows = self._acting.recalled(self.rows, self.real, self._heads, acts_again=act_again)
            self.rows_lost_at, self._pages = 0, None
            self.reconstructed, self.rests = False, not act_again
            self.note_bytes()
        if act_again:
            self.prompt.begin_anew(self.seen)

    @property
    def stored_heads(self) -> int:
        """KV heads of the model; a method may keep one set of rows per query head."""
        return self._heads

    def codec_for(self, head_dim: int, value_dim: int) -> RowsCodec | None:
        """The method's codec for rows of these widths in this layer, None without one."""
        return None if self._coding is None else self._coding.settle(head_dim, value_dim)

    def hold(self, rows: Layout, tokens: int, heads: int, real: Tensor | None = None) -> None:
        """Begin, in an empty layer, with rows that were computed before: those of a sequence of `tokens` tokens.

        rows: any layout, its positions below `tokens`; memory that others read too comes as `shared()`. heads: KV heads
        of the model. real: [batch] tokens of every batch row, on the CPU, where they differ; shorter ones count as
        padded on the left. What is fed next continues these sequences.
        """
        if self.rows is not None:
            raise CacheStateError("the layer has rows already; reset() the cache first.")
        self.rows, self._heads = rows, heads
        self.real = torch.full((rows.lengths.shape[0],), tokens) if real is None else real.clone()
        self.seen, self._longest, self._padded_to = tokens, tokens, tokens - int(self.real.min())
        self.is_initialized = True
        if self.rule.span is not None:
            self._leave_window(tokens)
        elif bool((rows.lengths < self.real[:, None]).any()):
            self.rows_lost_at = tokens
        if self.acts:
            self._acting.grant(self.budget_rows())
        self.note_bytes()

    def begin_behind(self, tokens: int) -> None:
        """Count, in an empty layer, as if one sequence of `tokens` tokens had passed and left no row."""
        if self.rows is not None:
            raise CacheStateError("the layer has rows already; reset() the cache first.")
        self.real, self.seen, self._longest = torch.tensor([tokens]), tokens, tokens
        self.is_initialized = True

    def lend(self) -> Layout:
        """The rows, which leave the layer until `resume`: nothing may be fed meanwhile."""
        assert self.rows is not None
        rows, self.rows = self.rows, None
        return rows

    def resume(self, rows: Layout | None, tokens: int, *, dropped: bool) -> None:
        """Go on after `tokens` tokens of every batch row were decoded elsewhere.

        rows: None where nobody will ask for them again. dropped: whether the method has dropped rows meanwhile.
        """
        assert self.real is not None
        self.rows = rows
        self.seen, self.real, self._longest = self.seen + tokens, self.real + tokens, self._longest + tokens
        if dropped:
            self.rows_lost_at = self.seen
        self.note_bytes()

    def crop(self, tokens_to_remove: int) -> None:
        """Take tokens back. Negative: that many of the newest; positive: down to that length (as transformers has it).

        Raises CacheStateError when rows of the remaining tokens are gone, so the state cannot be what it was.
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 gives a number on the device
        remaining = self.seen + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self.seen)
        if remaining == self.seen or self.rows is None:
            return
        if remaining < 0:
            raise CacheStateError(f"cannot take back {-tokens_to_remove} tokens: the cache has seen {self.seen}.")
        unfinished = self.prompt.tokens is not None and not self.prompt.ended(self.seen)
        if remaining < self.rows_lost_at or (self.acts and (unfinished or self.method.schedule.every)):
            raise CacheStateError(
                f"cannot take tokens back under {self.method}: rows of the remaining tokens are already dropped. "
                "Use fullkv for assisted or prompt-lookup decoding, or fork() the cache before trying tokens."
            )
        if remaining == 0:
            self.reset()
            return
        assert self.real is not None
        removed = self.seen - remaining
        if remaining < self._padded_to:
            raise CacheStateError(f"cannot take back {removed} tokens: they reach into the padding of a batch row.")
        real = self.real - removed
        view = self.rows.view()
        kept = (
            ((view.head_positions >= 0) & (view.head_positions < real.to(view.keys.device)[:, None, None]))
            .sum(-1)
            .cpu()
        )
        if self.rule.span is not None and bool(
            (kept < torch.minimum(real, torch.tensor(self.rule.span - 1))[:, None]).any()
        ):
            raise CacheStateError(
                f"cannot take back {removed} tokens: a window layer keeps only {ROLLBACK} tokens beyond its window."
            )
        self.rows, self.seen, self.real = self.rows.truncated(kept), remaining, real
        if self._pages is not None:
            self._pages.truncate(kept)
        self._longest = int(real.max())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Batch rows in the order `beam_idx` (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every batch row `repeats` times, next to itself."""
        if self.rows is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The batch rows `indices`, everything that belongs to a row included."""
        if self.rows is None:
            return
        assert self.real is not None
        self.rows = self.rows.select_batch(indices)
        host = indices.cpu()
        self.real = self.real[host]
        self._longest = int(self.real.max())
        self._acting = self._acting.selected(indices)
        self._coding = None if self._coding is None else self._coding.selected(indices)
        self._read_budget = None if self._read_budget is None else self._read_budget[host]
        self._pages = None if self._pages is None else self._pages.selected(indices)

    def fork(self, prompt: Prompt) -> Self:
        """An independent layer over the same memory; the first write on either side copies."""
        twin = type(self)(
            self.method,
            layer_idx=self.layer_idx,
            num_layers=self.num_layers,
            rule=self.rule,
            kernel=self.kernel,
            family=self.family,
            prompt=prompt,
            rope=self.rope,
        )
        twin.keeps_whole_window = self.keeps_whole_window
        twin._acting, twin.reconstructed, twin.rests = self._acting.copied(), self.reconstructed, self.rests
        twin._coding = copy.copy(self._coding)
        twin._pages = None if self._pages is None else self._pages.shared()
        twin._read_budget = self._read_budget
        twin.rows = None if self.rows is None else self.rows.shared()
        twin.seen, twin.real, twin.rows_lost_at = self.seen, self.real, self.rows_lost_at
        twin._longest, twin._padded_to, twin._heads = self._longest, self._padded_to, self._heads
        twin.is_initialized, twin._noted = self.is_initialized, self._noted
        return twin


def storage_bytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors: a view counts as the storage it keeps alive."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
