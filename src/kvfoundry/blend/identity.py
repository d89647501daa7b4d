"""The identity of a model, made once for as long as nothing about the model changes.

Reading every weight takes a while; a request must not pay for it again. What can change is looked at instead: where
weights lie and how often they were written to, the configuration, and the adapters that are switched on.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfoundry.chunks import Identity
from kvfoundry.method import Method

_ADAPTERS = ("active_adapters", "merged_adapters", "disable_adapters", "scaling")

_known: weakref.WeakKeyDictionary[PreTrainedModel, dict[Any, tuple[Any, Identity]]] = weakref.WeakKeyDictionary()


def identity_now(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    method: str | Method | None,
    namespace: str = "",
) -> Identity:
    """`Identity.of` these, remembered until one of them changes."""
    words = None if tokenizer is None else len(tokenizer)
    spec = str(Method.parse("fullkv" if method is None else method))
    state = _state(model), id(tokenizer), words, spec, namespace
    known = _known.setdefault(model, {})
    if state not in known:
        if any(state[0] != other[0] for other in known):
            known.clear()  # of a model that is no more
        # The tokenizer is held, or another one might get its id.
        known[state] = tokenizer, Identity.of(model, tokenizer, method, namespace=namespace)
    return known[state][1]


def _state(model: PreTrainedModel) -> tuple[Any, ...]:
    tensors = tuple(
        (name, tensor.data_ptr(), _writes(tensor), str(tensor.dtype))
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
    )
    adapters = tuple(
        (name, *(str(getattr(module, what, None)) for what in _ADAPTERS))
        for name, module in model.named_modules()
        if hasattr(module, "merged_adapters")
    )
    return hash(tensors), adapters, str(model.config)


def _writes(tensor: Tensor) -> int:
    """How often a tensor was written to; those made in inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version
