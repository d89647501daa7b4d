"""One layer of the cache: the life of its rows.

transformers calls `update` with the new keys and values, then the attention function with whatever `update` returned.
Ours returns the layer itself, so that everything meets in `attend`: query, new rows, stored rows, mask, scaling.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvfoundry.acting import Turn
from kvfoundry.columns import picked_columns, restored_columns
from kvfoundry.errors import CacheStateError, UnsupportedModelError
from kvfoundry.kernels.attention.remembering import Remembering
from kvfoundry.layer_state import LayerState
from kvfoundry.layouts import DenseRows
from kvfoundry.layouts.base import Reading
from kvfoundry.method import Method
from kvfoundry.prompt_mask import PromptMask, Tokens
from kvfoundry.reading import Reader
from kvfoundry.selection.evidence import Evidence, Memo


class CacheLayer(LayerState):
    """Rows of one attention layer under one method.

    A full-attention layer follows the method; a window layer (`rule` with a span) keeps its own rule and never loses a
    row that its window still reaches.
    """

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

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Sizes of the logical mask; which rows exist is the layer's own affair."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No maximum (name of 5.17)."""
        return -1

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
            Remembering(self.kernel) if columns > 1 and self.sums_columns else self.kernel,
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
        output = self._read(query, tokens, reading, in_prompt=in_prompt)
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
        self.rows, self.prompt.work = leader.rows.shared(), leader.prompt.work
        self._grant_reading(in_prompt=True)
        self.note_bytes()
        self._finish(query, positions, reading, module, own=True, in_prompt=in_prompt, columns=columns, memo=memo)
        self._halfway = False

    def _read(self, query: Tensor, tokens: Tokens, reading: Reading, *, in_prompt: bool) -> Tensor:
        """Attend to all rows, or to those that the method's patterns pick in the prompt and its reader in decode."""
        assert self.rows is not None and self.real is not None
        positions, prefill = tokens.positions, self.method.prefill
        if in_prompt and prefill is not None and self.rule.span is None:
            counts = torch.full_like(self.real, query.shape[2]) if tokens.counts is None else tokens.counts
            output, self.prompt.work = prefill.attend(
                self.rows, query, positions, counts, reading, self.layer_idx, self.prompt.work
            )
            return output
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
