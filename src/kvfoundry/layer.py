"""One layer of the cache: the life of its rows.

transformers calls `update` with the new keys and values, then the attention function with whatever `update` returned.
Ours returns the layer itself, so that everything meets in `attend`: query, new rows, stored rows, mask, scaling.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvfoundry.acting import Acting, Turn
from kvfoundry.codecs.base import RowsCodec
from kvfoundry.coding import Coding
from kvfoundry.columns import picked_columns, restored_columns
from kvfoundry.errors import CacheStateError, SpecError, UnsupportedModelError
from kvfoundry.kernels.attention import AttentionKernel, backend
from kvfoundry.layouts import DenseRows, Layout, RowsView
from kvfoundry.layouts.base import Reading
from kvfoundry.layouts.joined import JoinedRows
from kvfoundry.method import Method
from kvfoundry.pairing import LayerPair
from kvfoundry.prompt import Prompt
from kvfoundry.prompt_mask import PromptMask
from kvfoundry.reading import Reader
from kvfoundry.reading.state import PageState
from kvfoundry.rope import Rope
from kvfoundry.selection.evidence import Evidence, Memo
from kvfoundry.tensor_refusal import RefusesTensorUse
from kvfoundry.travelling import TravellingKey
from kvfoundry.visibility import WHOLE_PAST, WindowRule

# A window layer keeps this many tokens more than its window, so that speculative decoding can take tokens back.
ROLLBACK = 64


class CacheLayer(RefusesTensorUse, TravellingKey, CacheLayerMixin):
    """Rows of one attention layer under one method.

    A full-attention layer follows the method; a window layer (`rule` with a span) keeps its own rule and never loses a
    row that its window still reaches.
    """

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
        self.watch: Callable[[CacheLayer, Tensor, Tensor, Reading, nn.Module | None], None] | None = None
        self.pair: LayerPair | None = None  # set by the cache where the method merges two layers
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

    # The extension points of transformers.

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

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the first rows bring shape, dtype and device."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take the new rows and travel on as the key. [batch, heads, tokens, dim] each."""
        if self._pending is not None:
            raise UnsupportedModelError(
                f"{self.family}: layer {self.layer_idx} stored keys but never attended through kvfoundry's attention "
                "function; attach it again with kvfoundry.attach(model), or its family is not served."
            )
        self._pending = (key_states, value_states)
        return self, self

    def get_seq_length(self) -> int:
        """Columns seen: positions go on from here, whatever is stored."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Sizes of the logical mask; which rows exist is the layer's own affair."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No maximum (name of 5.17)."""
        return -1

    # One call.

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
    ) -> Tensor:
        """Feed one call by hand: [batch, heads, tokens, dim] tensors as attention sees them; output like query.

        attention_mask: [batch, tokens of this call], 0 for padding.
        """
        past = None
        if attention_mask is not None:
            past = torch.ones(attention_mask.shape[0], self.seen, dtype=torch.bool, device=attention_mask.device)
            past = torch.cat([past, attention_mask.bool()], dim=1)
        self.update(key, value)
        return self.attend(query, PromptMask(attention_mask=past), scaling=scaling)

    def attend(
        self,
        query: Tensor,
        mask: PromptMask,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        module: nn.Module | None = None,
    ) -> Tensor:
        """Store the pending rows, attend over all rows, then let the method act.

        query: [batch, query_heads, tokens, head_dim]. Returns [batch, query_heads, tokens, value_dim], zeros for
        padding.
        """
        if self._pending is None:
            raise UnsupportedModelError(
                f"{self.family}: layer {self.layer_idx} attends to keys that another layer stored; "
                "shared keys and values are not served."
            )
        (keys, values), self._pending = self._pending, None
        if not self.is_initialized:
            self.is_initialized = True
            self.real = torch.zeros(keys.shape[0], dtype=torch.long)
        assert self.real is not None
        mask.check(self.rule, self.family)
        columns = query.shape[2]
        tokens = mask.tokens(columns, self.seen, self.real, query.device)
        if tokens.gather is not None:
            query, keys, values = (picked_columns(tensor, tokens.gather) for tensor in (query, keys, values))
        if self._coding is not None:
            self._coding.enter(keys, values)
        self._padded_to = max(self._padded_to, tokens.padded_to)
        in_prompt = self._enter(columns)
        self._halfway = True
        reading = Reading(
            self.kernel,
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap,
            sinks,
            self.rule,
            self.method.unread_distance if self.seen and not self.rests else None,
        )
        before = (self.rows.lengths if self.rows is not None else None, self.real, self._longest)
        own = self.rows is None
        self.real = self.real + (columns if tokens.counts is None else tokens.counts)
        self._longest = self._longest + columns if tokens.counts is None else int(self.real.max())
        self._store(keys, values, tokens.positions, tokens.counts)
        assert self.rows is not None
        output = self._read(query, tokens.positions, reading, in_prompt=in_prompt)
        if columns > 1:  # a single row cannot make a new peak that `peak_nbytes` of the cache would not see
            self.note_bytes()
        if self.watch is not None:
            self.watch(self, query, tokens.positions, reading, module)
            self.rows = None if before[0] is None else self.rows.truncated(before[0])
            self.real, self._longest = before[1], before[2]
        else:
            self._finish(query, tokens.positions, reading, module, own=own, in_prompt=in_prompt, columns=columns)
        self._halfway = False
        return output if tokens.gather is None else restored_columns(output, tokens.gather, tokens.positions, columns)

    def _finish(
        self,
        query: Tensor,
        positions: Tensor,
        reading: Reading,
        module: nn.Module | None,
        *,
        own: bool,
        in_prompt: bool,
        columns: int,
        memo: Memo | None = None,
    ) -> None:
        """After a call was read: let the method act, and write down what a codec is due."""
        self.seen += columns
        if self.acts:
            self._act(query, positions, reading, module, own=own, in_prompt=in_prompt, columns=columns, memo=memo)
        elif self.rule.span is not None and not self.keeps_whole_window:
            self._leave_window(columns)
        if self.pair is not None:
            self.pair.after(self, prompt_open=not self.prompt.ended(self.seen))
        self._code(query, positions)
        if columns > 1:
            self.note_bytes()

    def follow(
        self,
        leader: CacheLayer,
        query: Tensor,
        positions: Tensor,
        reading: Reading,
        module: nn.Module | None,
        memo: Memo,
    ) -> None:
        """Take part, while empty, in the first call of another cache's layer, as if it had been made here.

        leader: the layer that stores and reads; called from its `watch`, with what that is given. memo: what the
        followers of one call need not compute again.
        """
        assert self.rows is None and leader.rows is not None and leader.prompt.tokens is not None
        columns = leader.prompt.tokens
        self.is_initialized, self._heads = True, leader._heads
        self.real, self._longest, self._padded_to = leader.real, leader._longest, leader._padded_to
        in_prompt = self._enter(columns)
        self._halfway = True
        if self._coding is not None:
            view = leader.rows.view()
            self._coding.enter(view.keys, view.values)
        self.rows = leader.rows.shared()
        self._grant_reading(in_prompt=True)
        self.note_bytes()
        self._finish(query, positions, reading, module, own=True, in_prompt=in_prompt, columns=columns, memo=memo)
        self._halfway = False

    def join(self, parts: Sequence[CacheLayer]) -> None:
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

    def _read(self, query: Tensor, positions: Tensor, reading: Reading, *, in_prompt: bool) -> Tensor:
        """Attend to all rows, or in decode to those that the method's reader picks."""
        assert self.rows is not None and self.real is not None
        reader = self._grant_reading(in_prompt=in_prompt)
        if reader is None or in_prompt or self.watch is not None:
            return self.rows.attend(query, positions, reading)
        assert self._read_budget is not None
        output, self._pages = reader.attend(
            self.rows, query, positions, reading, self._pages, self._read_budget, self.method.granularity
        )
        return output

    def _grant_reading(self, *, in_prompt: bool) -> Reader | None:
        """The method's reader if it serves this layer, its budget brought up to date while the prompt lasts."""
        reader = self.method.read
        if reader is None or self.rule.span is not None or self.layer_idx < reader.skip_layers:
            return None
        if in_prompt or self._read_budget is None:
            assert self.real is not None
            self._read_budget = reader.budget_rows(self.real)
        return reader

    def _enter(self, columns: int) -> bool:
        """Whether this call belongs to the prompt."""
        in_prompt = self.prompt.enter(self.seen, columns)
        waits = self.method.reconstructs is not None and self.acts and not self.reconstructed
        if waits and not in_prompt and self.watch is None:
            if self.exceeds_budget():
                raise CacheStateError(
                    f"{self.method} has to read the prompt a second time before decoding: use kvfoundry.generate or "
                    "kvfoundry.prefill, or call kvfoundry.compress_by_reconstruction(model, tokenizer, cache, ids)."
                )
            self.reconstructed = True  # the prompt was within the budget
        return in_prompt

    def budget_rows(self) -> Tensor:
        """Rows per head that the method grants for the tokens seen: [batch], on the CPU."""
        assert self.method.budget is not None and self.real is not None
        return self.method.budget.rows(self.real, self.layer_idx, self.num_layers)

    def exceeds_budget(self) -> bool:
        """Whether any head stores more rows than the method grants."""
        return self.rows is not None and bool((self.rows.lengths > self.budget_rows()[:, None]).any())

    def evict(self, evidence: Evidence, method: Method) -> None:
        """Drop rows down to the budget now, as `method` says; evidence.rows is the view of the present rows."""
        assert self.rows is not None
        kept = self._acting.evicted(method, self.rows, evidence, self.budget_rows())
        if kept is not self.rows:
            self.rows, self.rows_lost_at, self._pages = kept, self.seen, None
        self.note_bytes()

    def _store(self, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor | None) -> None:
        assert self.real is not None
        last_position = self._longest - 1
        if self.rows is None:
            self._heads = keys.shape[1]
            self.rows = DenseRows.of_tokens(keys, values, positions, counts, last_position)
            return
        stored_heads = self.rows.lengths.shape[1]
        if keys.shape[1] != stored_heads:  # one kept set per query head
            groups = stored_heads // keys.shape[1]
            keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        self.rows = self.rows.append(keys, values, positions, counts, last_position)

    def _act(
        self,
        query: Tensor,
        positions: Tensor,
        reading: Reading,
        module: nn.Module | None,
        *,
        own: bool,
        in_prompt: bool,
        columns: int,
        memo: Memo | None,
    ) -> None:
        """Let the method observe this call, and drop rows when its schedule says so."""
        assert self.rows is not None and self.real is not None
        place = self.layer_idx, self.num_layers
        turn = Turn(query, positions, reading, module, self.real, place, own, columns, in_prompt,
                    prompt_ends=in_prompt and self.prompt.ended(self.seen), memo=memo)  # fmt: skip
        kept, dropped = self._acting.after(turn, self.rows)
        self.rows = kept
        if dropped:
            self.rows_lost_at, self._pages = self.seen, None

    def end_reconstruction(self) -> None:
        """The prompt has been read the second time: what stays of it may be written down."""
        self.reconstructed, self.rests = True, False
        if isinstance(self.rows, DenseRows):
            # The second reading went through spare slots: a layer that dropped nothing still holds their memory.
            self.rows = self._newest(self.rows.lengths)
        self._code()
        self.note_bytes()

    def _code(self, query: Tensor | None = None, positions: Tensor | None = None) -> None:
        """Let the codec write down what is due. Rows that the prompt's end may still drop or mix are left whole."""
        if self._coding is None:
            return
        assert self.rows is not None
        prompt_ends, method = self.prompt.ended(self.seen), self.method
        unread = method.reconstructs is not None and not self.reconstructed
        waits = self.evicts and (unread or (not prompt_ends and method.schedule.prefill != "never"))
        self.rows = self._coding.after(
            self.rows, query, positions, self.prompt.losses, prompt_ends=prompt_ends, waits=waits
        )

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

    # State.

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

    @property
    def is_watched(self) -> bool:
        """Whether something else stands in for the method, or rows are read that are to go elsewhere."""
        return self.watch is not None or self.keeps_whole_window

    @property
    def decode_budget(self) -> Tensor:
        """Rows per head that stay after a step of decoding: [batch], on the CPU."""
        return self.budget_rows() if self._acting.budget is None else self._acting.budget

    @property
    def reads_pages(self) -> tuple[Reader, Tensor] | None:
        """What picks the rows that a step of decoding reads, and how many: [batch], on the CPU. None: it reads all."""
        reader = self._grant_reading(in_prompt=False)
        return None if reader is None or self._read_budget is None else (reader, self._read_budget)

    def look_back(self, query: Tensor, positions: Tensor, reading: Reading, module: nn.Module | None) -> None:
        """Let the method see queries of tokens whose rows the layer holds, before the rest of the prompt comes.

        query: [batch, query_heads, tokens, head_dim]; positions: [batch, tokens], ascending, -1 behind.
        """
        assert self.rows is not None and self.real is not None
        if self.acts:
            place = self.layer_idx, self.num_layers
            turn = Turn(query, positions, reading, module, self.real, place, own=False, columns=query.shape[2],
                        in_prompt=True, prompt_ends=False)  # fmt: skip
            self.rows = self._acting.noted(turn, self.rows)
            self.note_bytes()

    def crop(self, tokens_to_remove: int) -> None:
        """Take tokens back. Negative: that many of the newest; positive: down to that length (as transformers has it).

        Raises CacheStateError when rows of the remaining tokens are gone, so the state cannot be what it was.
        """
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

    def fork(self, prompt: Prompt) -> CacheLayer:
        """An independent layer over the same memory; the first write on either side copies."""
        twin = CacheLayer(
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
