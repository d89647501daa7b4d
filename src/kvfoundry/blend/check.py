"""Before the first blend with a model: two short chunks, and whether what comes out is what the model says.

A wrong rotation gives keys that look right, and answers that read well and are wrong. So every model is asked once:

- Read at other positions, does it store the keys that we get by moving those of the first positions, and equal values?
- Do two chunks give the logits of a plain prefill, when the second is computed again on top of the first, and when both
  are?
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvfoundry import compat
from kvfoundry.attention import attach, backend_of, family_of
from kvfoundry.blend.blended import blend_unchecked
from kvfoundry.blend.blending import Blending
from kvfoundry.blend.ropes import ropes_of, rotary_state
from kvfoundry.blend.select.base import Selector
from kvfoundry.blend.spec import Blend
from kvfoundry.cache import KVCache
from kvfoundry.chunks import ChunkKV
from kvfoundry.chunks.passage import read_passage
from kvfoundry.devices import input_device
from kvfoundry.errors import DataError, UnsupportedModelError

_FIRST, _SECOND, _QUESTION = 6, 7, 3
# How far the chunk is moved: far enough for a small fault of the frequencies to show.
_FAR = 200


@dataclass(frozen=True)
class RowShape:
    """What rows of a model look like. layers: heads, key channels and value channels of every attention layer."""

    layers: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, chunk: ChunkKV) -> RowShape:
        """The shape of a plain chunk."""
        held = ((layer.heads, layer.record.tensors) for layer in chunk.layers)
        dims = ((heads, rows["keys"].shape[-1], rows["values"].shape[-1]) for heads, rows in held)
        return cls(tuple(dims), chunk.dtype)

    def __str__(self) -> str:
        heads, width, _ = self.layers[0]
        return f"{len(self.layers)} attention layers, {heads} heads of width {width}, in {self.dtype}"


_verdicts: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, str | RowShape]] = weakref.WeakKeyDictionary()


def require_exact(model: PreTrainedModel) -> RowShape:
    """The shape of the model's rows, if it passes the check, now or before in the state that it is in.

    Raises UnsupportedModelError otherwise.
    """
    attach(model)
    state = f"{backend_of(model)} {rotary_state(model)}"
    if _verdicts.get(model, ("", ""))[0] != state:
        _verdicts[model] = state, _verdict(model)
    verdict = _verdicts[model][1]
    if isinstance(verdict, str):
        raise UnsupportedModelError(
            f"{family_of(model)}: {verdict}; blended passages would give wrong answers. Read the prompt whole."
        )
    return verdict


def require_fitting(model: PreTrainedModel, shape: RowShape, chunk: ChunkKV) -> None:
    """Raise DataError for a chunk whose rows, or tokens, this model does not have."""
    if len(chunk.layers) == len(shape.layers) and chunk.layers[0].heads == shape.layers[0][0]:
        chunk = chunk.plain(model)
    found = RowShape.of(chunk) if all(layer.is_plain for layer in chunk.layers) else "compressed rows of other layers"
    if found != shape:
        raise DataError(f"a chunk was made with another model: it has {found}, and {family_of(model)} has {shape}.")
    if int(chunk.token_ids.max()) >= model.config.get_text_config(decoder=True).vocab_size:
        raise DataError(f"a chunk was made with another model: its tokens are not in {family_of(model)}'s vocabulary.")


@torch.inference_mode()
def _verdict(model: PreTrainedModel) -> str | RowShape:
    """What is wrong with blending this model, in words; the shape of its rows when nothing is."""
    ids = _sample(model)
    first, second, question = ids.split([_FIRST, _SECOND, _QUESTION])
    fault = _moves(model, first)
    if fault is not None:
        return fault
    chunks = [read_passage(model, own) for own in (first, second)]
    return _blends(model, ids, chunks, question) or RowShape.of(chunks[0])


def _sample(model: PreTrainedModel) -> Tensor:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    tokens = _FIRST + _SECOND + _QUESTION
    return torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(0))


def _moves(model: PreTrainedModel, ids: Tensor) -> str | None:
    ropes = ropes_of(model, KVCache(model))
    far = min(_FAR, max(1, _trained_length(model) - len(ids) - 1))
    near, there = torch.arange(len(ids))[None, None], torch.arange(far, far + len(ids))[None, None]
    stored, wanted = _stored(model, ids, near[0]), _stored(model, ids, there[0])
    for number, (rope, (keys, values), (far_keys, far_values)) in enumerate(zip(ropes, stored, wanted, strict=True)):
        before, after = near.to(keys.device), there.to(keys.device)
        moved = rope.move(keys, before, after, length=len(ids), to_length=far + len(ids))
        if _apart(moved, far_keys) > _bound(model):
            return f"keys that are moved to other positions are not those that layer {number} stores there"
        if _apart(values, far_values) > _bound(model):
            return f"the values of layer {number} depend on where in the text a passage stands"
    return None


def _trained_length(model: PreTrainedModel) -> int:
    """Positions up to which the frequencies of the embedding do not change."""
    config = model.config.get_text_config(decoder=True)
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    named = [config.max_position_embeddings, parameters.get("original_max_position_embeddings")]
    return min(length for length in named if isinstance(length, int))


class _Recorder(DynamicCache):
    """A transformers cache that remembers what attention modules hand to it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.rows[layer_idx] = key_states, value_states
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _stored(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every attention layer for tokens at these positions."""
    recorder = _Recorder()
    _read(model, ids, recorder, position_ids=positions.to(input_device(model)))
    return [recorder.rows[layer] for layer in sorted(recorder.rows)]


def _read(model: PreTrainedModel, ids: Tensor, cache: Any, **more: Any) -> Tensor:
    """Logits [tokens, vocabulary]."""
    output = model(ids[None].to(input_device(model)), use_cache=True, **{compat.CACHE_ARGUMENT: cache}, **more)
    return output.logits[0].float()


@dataclass(frozen=True)
class _From(Selector):
    """Every token from one on."""

    start: int

    name = "from"
    summary = source = "the check of a model"

    def choose(self, blending: Blending, ratio: float) -> list[Tensor]:
        return [tokens[self.start :] for tokens in blending.everything]


def _blends(model: PreTrainedModel, ids: Tensor, chunks: list[ChunkKV], question: Tensor) -> str | None:
    wanted = _read(model, ids, DynamicCache())[-_QUESTION:]
    for start in (_FIRST, 0):  # the rows of the first chunk are exact where they are
        blended = blend_unchecked(model, [chunks], [question], Blend(1.0, _From(start)))
        mask = torch.ones(1, len(ids), dtype=torch.long, device=input_device(model))
        found = _read(model, question, blended.cache, attention_mask=mask)
        if _apart(found, wanted) > _bound(model):
            return "two passages with every token computed again do not give the logits of a plain prefill"
    return None


def _bound(model: PreTrainedModel) -> float:
    """Largest difference that rounding may make, relative to the largest number: it adds up from layer to layer."""
    eps = torch.finfo(model.dtype).eps
    return (
        1e-4 if eps < 1e-5 else max(5e-2, 4 * eps * model.config.get_text_config(decoder=True).num_hidden_layers ** 0.5)
    )


def _apart(found: Tensor, wanted: Tensor) -> float:
    scale = max(1.0, float(wanted.abs().max()))
    return float((found.float() - wanted.float()).abs().max()) / scale
