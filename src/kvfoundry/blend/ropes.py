"""The rotary embeddings of a model, for rows that move to other positions."""

from __future__ import annotations

import hashlib
import weakref
from typing import Any

from transformers import PreTrainedModel

from kvfoundry.attention import family_of
from kvfoundry.cache import KVCache
from kvfoundry.errors import UnsupportedModelError
from kvfoundry.rope import Rope
from kvfoundry.rope_layout import rotary_module

_known: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, list[Rope]]] = weakref.WeakKeyDictionary()


def ropes_of(model: PreTrainedModel, cache: KVCache) -> list[Rope]:
    """The embedding of every attention layer; UnsupportedModelError where rows cannot be moved to other positions.

    Asking every attention module takes a while, so the answer is remembered until something about it changes.
    """
    state = rotary_state(model)
    if _known.get(model, ("", []))[0] != state:
        _known[model] = state, _asked(model, cache)
    return _known[model][1]


def rotary_state(model: PreTrainedModel) -> str:
    """A digest of what decides how a model rotates: dtype, devices, settings and frequencies."""
    config = model.config.get_text_config(decoder=True)
    places = getattr(model, "hf_device_map", None) or model.device
    digest = hashlib.sha256(f"{model.dtype} {places} {getattr(config, 'rope_parameters', None)}".encode())
    rotary = rotary_module(model)
    for name, buffer in [] if rotary is None else rotary.named_buffers():
        if "original" in name or fixed_frequencies(model):  # others change with every longer text
            digest.update(buffer.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _asked(model: PreTrainedModel, cache: KVCache) -> list[Rope]:
    if len(cache.attention_layers) != len(cache.layers) - _stateless(cache):
        raise UnsupportedModelError(
            f"{family_of(model)} has recurrent-state layers, whose state belongs to one text from its start; passages "
            "cannot be blended."
        )
    attending = [i for i, layer in enumerate(cache.layers) if layer in cache.attention_layers]
    return [Rope.of(model, i) for i in attending]


def _stateless(cache: KVCache) -> int:
    return sum(type(layer).__name__ == "DummyLayer" for layer in cache.layers)


def fixed_frequencies(model: PreTrainedModel) -> bool:
    """Whether the frequencies of every layer are the same however long a text is."""
    parameters: Any = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return not any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)
