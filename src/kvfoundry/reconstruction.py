"""The second pass of KVzip: the model repeats its context, and rows that this does not need are dropped."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfoundry import compat
from kvfoundry.cache import KVCache
from kvfoundry.errors import CacheStateError, DataError, SpecError
from kvfoundry.kernels.column_max import column_max
from kvfoundry.layer import CacheLayer
from kvfoundry.layouts.base import Reading
from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.pool import GivenHeads, pooled_counts
from kvfoundry.selection.scores.reconstruction import RECEIVED, Reconstruction

_REPEAT_ALL = "\n\nRepeat the previous context exactly."
_REPEAT_FROM = "\n\nRepeat the part of the previous context exactly, starting with "

# Below this many tokens at a time a pass would read mostly its own instructions.
_LEAST_CHUNK = 32


@torch.inference_mode()
def compress_by_reconstruction(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: KVCache,
    ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    alike: Sequence[KVCache] = (),
) -> None:
    """Run the second pass of a reconstructing method (`kvzip`) and drop what its budget does not hold.

    ids: [batch, tokens], everything that the cache has seen; attention_mask: the same shape, 0 for padding, which must
    not count in the positions under which the prompt was read (`generate` sees to that). alike: further caches of the
    same prompt whose methods read it the second time as this one's does; one pass serves them all.
    `kvfoundry.generate` and `kvfoundry.prefill` do this by themselves. By hand:

        cache = kvfoundry.KVCache(model, "kvzip(budget=256)")
        model(ids, past_key_values=cache)
        kvfoundry.compress_by_reconstruction(model, tokenizer, cache, ids)

    Raises SpecError for a method that does not reconstruct, CacheStateError when the cache has seen other tokens or
    has dropped rows before, DataError when the model's length leaves no room for the pass.
    """
    plan = cache.method.reconstructs
    if plan is None:
        raise SpecError(f"{cache.method} does not reconstruct its context; kvzip does.")
    caches, mask = [cache, *alike], torch.ones_like(ids) if attention_mask is None else attention_mask
    for other in caches:
        if other.method.reconstructs is None or other.method.reconstructs.reading != plan.reading:
            raise SpecError(f"{other.method} does not read the prompt the second time as {cache.method} does.")
        _check(other, ids, mask)
    exceeding = [other for other in caches if any(layer.exceeds_budget() for layer in _evicting(other))]
    if exceeding:
        received = _received(model, tokenizer, exceeding[0], plan, ids, mask)
        for other in exceeding:
            # They hold the same rows, so a pass of its own would have brought each to the same size.
            other.prompt.peak_nbytes = max(other.prompt.peak_nbytes, exceeding[0].prompt.peak_nbytes)
            _evict(other, received)
    for other in caches:
        for layer in other.attention_layers:
            layer.end_reconstruction()


def _evicting(cache: KVCache) -> list[CacheLayer]:
    return [layer for layer in cache.attention_layers if layer.evicts]


def _check(cache: KVCache, ids: Tensor, mask: Tensor) -> None:
    if any(layer.reconstructed or layer.rows_lost_at for layer in _evicting(cache)):
        raise CacheStateError(
            f"{cache.method}: rows of this cache are already dropped, so its context cannot be repeated; "
            "start a new cache, or fork() one before it is compressed."
        )
    counts = mask.sum(dim=1).cpu()
    real = cache.attention_layers[0].real
    if ids.shape[1] != cache.seen_tokens or real is None or not torch.equal(counts, real):
        raise CacheStateError(
            f"{cache.method}: ids of shape {tuple(ids.shape)} are not the {cache.seen_tokens} columns that the cache "
            "has seen; pass all of them, with the attention_mask they were read under."
        )


@dataclass
class _Received:
    """Collects, layer by layer, the largest weight that the pass spends on the rows of the chunk being repeated.

    The layers are those that evict, by their place among the full-attention layers.
    """

    sinks: int
    spans: list[tuple[int, int]] = field(default_factory=list)
    weights: dict[int, Tensor] = field(default_factory=dict)
    modules: dict[int, nn.Module | None] = field(default_factory=dict)
    readings: dict[int, Reading] = field(default_factory=dict)

    def __call__(
        self, layer: CacheLayer, query: Tensor, positions: Tensor, reading: Reading, module: nn.Module | None
    ) -> None:
        if not layer.evicts:
            return
        assert layer.rows is not None
        view, device = layer.rows.view(), query.device
        index = self._slots(view.lengths[:, 0].tolist(), positions).to(device)
        if view.keys.shape[2] == 0 or index.shape[1] == 0:
            return
        gather = index.clamp(min=0)[:, None, :, None].expand(-1, view.keys.shape[1], -1, view.keys.shape[3])
        # Nothing was dropped yet, so a row's slot is its token index.
        visibility = reading.visibility(positions, index[:, None], own=False, complete=False)
        largest = column_max(
            query,
            view.keys.gather(2, gather),
            visibility,
            scaling=reading.scaling,
            softcap=reading.softcap,
            sinks=reading.sinks,
        )
        name = layer.layer_idx
        if name not in self.weights:
            self.weights[name] = torch.zeros(*query.shape[:2], view.keys.shape[2], device=device)
            self.modules[name], self.readings[name] = module, reading
        known = self.weights[name]
        if known.shape[2] < view.keys.shape[2]:
            known = torch.cat([known, known.new_zeros(*known.shape[:2], view.keys.shape[2] - known.shape[2])], dim=2)
        spread = index.clamp(min=0)[:, None].expand(-1, known.shape[1], -1)
        absent = (index < 0)[:, None]
        self.weights[name] = known.scatter_reduce(2, spread, largest.masked_fill(absent, 0.0), "amax")

    def _slots(self, lengths: list[int], positions: Tensor) -> Tensor:
        """Slots that the softmax of each batch row runs over: [batch, width], -1 behind them."""
        fresh = (positions >= 0).sum(dim=1).tolist()
        rows = []
        for (start, stop), length, new in zip(self.spans, lengths, fresh, strict=True):
            chunk = [*range(min(self.sinks, start)), *range(start, stop)]
            rows.append([*chunk, *range(length - new, length)] if new else [])
        width = max(len(row) for row in rows)
        return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


def _received(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: KVCache,
    plan: Reconstruction,
    ids: Tensor,
    mask: Tensor,
) -> _Received:
    """Repeat the context of every batch row, chunk by chunk. Afterwards the cache is as it was."""
    texts = [row[real.bool()].tolist() for row, real in zip(ids.cpu(), mask.cpu(), strict=True)]
    passes = [_passes(model, tokenizer, text, plan) for text in texts]
    collect = _Received(plan.sinks)
    device = ids.device
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    try:
        for layer in cache.attention_layers:
            layer.watch = collect
        for step in range(max(len(own) for own in passes)):
            # A batch row that is done brings only padding.
            now = [own[step] if step < len(own) else ((0, 0), []) for own in passes]
            collect.spans = [span for span, _ in now]
            width = max(len(tokens) for _, tokens in now)
            fed = torch.tensor([[pad] * (width - len(tokens)) + tokens for _, tokens in now], device=device)
            real = torch.tensor([[0] * (width - len(tokens)) + [1] * len(tokens) for _, tokens in now], device=device)
            whole = torch.cat([mask.to(real.dtype), real], dim=1)
            positions = (whole.cumsum(dim=1) - 1).clamp(min=0)[:, -width:]
            # Layers that hold a state instead of rows cannot take tokens back: they work on a copy.
            states = [None if isinstance(layer, CacheLayer) else copy.deepcopy(layer) for layer in cache.layers]
            model(
                fed,
                attention_mask=whole,
                position_ids=positions,
                **{compat.CACHE_ARGUMENT: cache},
                use_cache=True,
                logits_to_keep=1,
            )
            cache.layers = [
                layer if state is None else state for layer, state in zip(cache.layers, states, strict=True)
            ]
    finally:
        for layer in cache.attention_layers:
            layer.watch = None
    return collect


def _passes(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: list[int], plan: Reconstruction
) -> list[tuple[tuple[int, int], list[int]]]:
    """For each chunk of one context: the token indices it spans, and the tokens to feed."""
    answer = _encoded(tokenizer, _answer_cue(tokenizer))
    repeat_all, repeat_from = _encoded(tokenizer, _REPEAT_ALL), _encoded(tokenizer, _REPEAT_FROM)
    size = min(plan.chunk, len(text))
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(limit, int):
        room = limit - len(text) - max(len(repeat_all), len(repeat_from) + plan.overlap) - len(answer)
        if room < min(size, _LEAST_CHUNK):
            raise DataError(
                f"a context of {len(text)} tokens leaves no room to repeat it within the model's {limit} positions; "
                "shorten it, or choose a method without a second pass."
            )
        size = min(size, room)
    found = []
    for start in range(0, len(text), size):
        stop = min(start + size, len(text))
        again = text[start:stop]
        if start == 0 and again and again[0] == tokenizer.bos_token_id:
            again = again[1:]
        cue = repeat_all if start == 0 else repeat_from + text[max(0, start - plan.overlap) : start]
        found.append(((start, stop), cue + answer + again))
    return found


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _answer_cue(tokenizer: PreTrainedTokenizerBase) -> str:
    """What opens the model's turn in its chat template; a blank line where it has none."""
    if not tokenizer.chat_template:
        return "\n\n"
    marker = "Repeat."
    turn = [{"role": "user", "content": marker}]
    rendered = str(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))
    return rendered.rsplit(marker, 1)[1]


def _evict(cache: KVCache, received: _Received) -> None:
    method: Any = cache.method
    layers = _evicting(cache)
    evidences = [_evidence(layer, received) for layer in layers]
    if method.reconstructs.scope == "model":
        total = torch.zeros_like(evidences[0].seen)
        scores, protected, valid = [], [], []
        for layer, evidence in zip(layers, evidences, strict=True):
            rows, view = layer.budget_rows(), evidence.rows
            own = received.weights[layer.layer_idx][..., : view.keys.shape[2]]
            groups = evidence.groups if method.granularity == "query_head" else 1
            scores.append(own if groups > 1 else evidence.reduced(own))
            protected.append(method.protect.mask(view, evidence.seen, rows).repeat_interleave(groups, dim=1))
            valid.append(view.valid.repeat_interleave(groups, dim=1))
            total = total + rows * scores[-1].shape[1]
        counts = pooled_counts(scores, protected, valid, total)
        methods = [method.replace(heads=GivenHeads(count)) for count in counts]
    else:
        methods = [method] * len(layers)
    for layer, evidence, own_method in zip(layers, evidences, methods, strict=True):
        layer.evict(evidence, own_method)


def _evidence(layer: CacheLayer, received: _Received) -> Evidence:
    assert layer.rows is not None and layer.real is not None
    weights, view = received.weights[layer.layer_idx], layer.rows.view()
    query = view.keys.new_zeros(*weights.shape[:2], 0, view.keys.shape[3])
    positions = torch.zeros(view.keys.shape[0], 0, dtype=torch.long, device=view.keys.device)
    return Evidence(
        query,
        positions,
        query,
        positions,
        view,
        received.readings[layer.layer_idx],
        False,
        layer.real,
        layer.layer_idx,
        layer.num_layers,
        layer.method.group,
        layer.rope,
        received.modules[layer.layer_idx],
        layer.method.granularity,
        {RECEIVED: weights},
    )
