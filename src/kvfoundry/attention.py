"""The two registrations with transformers, and `attach`, which selects them for one model.

Registering happens on the first attach, not on import. Under our attention a plain transformers cache, or none, works
as before: same backend, same mask.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from kvfoundry.errors import UnsupportedModelError
from kvfoundry.kernels.attention import backend, naive
from kvfoundry.layer import CacheLayer
from kvfoundry.prompt_mask import PromptMask, prompt_mask
from kvfoundry.travelling import TravellingKey

NAME = "kvfoundry"

# Families whose recurrent layers read what attention left in padded columns, so that a padded row has no right answer
# (measured by benchmarks/families.py; other recurrent families mask those columns).
_LEAKS_PADDING = {"recurrent_gemma"}

# Backend of prompt attention by the id of the config that a module carries; configs are not hashable.
_backend_of: dict[int, str] = {}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function. query [batch, heads, tokens, dim]; returns [batch, tokens, heads, dim]."""
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if isinstance(key, TravellingKey):
        family = key.family
        if isinstance(key, CacheLayer) and not isinstance(attention_mask, PromptMask):
            raise UnsupportedModelError(
                f"{family}: it does not build its mask through transformers' mask interface (or got a ready 4D mask), "
                "so padding and windows cannot be followed; pass a 2D attention_mask or use a transformers cache."
            )
        if kwargs.get("position_bias") is not None or kwargs.get("is_causal") is False:
            raise UnsupportedModelError(f"{family}: attention with a position bias or without causality is not served.")
        output = key.attend(query, attention_mask, scaling=scaling, softcap=softcap, sinks=sinks, module=module)
        return output.transpose(1, 2).contiguous(), None
    return _plain(module, query, key, value, attention_mask, dropout, scaling, softcap, sinks, kwargs), None


def _plain(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attention for tensors: a transformers cache, or none."""
    mask = attention_mask.dense if isinstance(attention_mask, PromptMask) else attention_mask
    name = _backend_of.get(id(getattr(module, "config", None)), "sdpa")
    if name == "eager" or softcap is not None or sinks is not None:
        return _eager(query, key, value, mask, scaling, softcap, sinks)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    kwargs = {name: value for name, value in kwargs.items() if name not in ("softcap", "s_aux")}
    return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)[0]


def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    queries, rows = query.shape[2], key.shape[2]
    if mask is None and queries > 1:
        mask = torch.ones(queries, rows, dtype=torch.bool, device=query.device).tril(rows - queries)[None, None]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask >= 0
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    weights = naive.attention_weights(query, key, mask, scaling=scaling, softcap=softcap, sinks=sinks).to(value.dtype)
    grouped = weights.reshape(value.shape[0], value.shape[1], -1, rows)
    output = torch.matmul(grouped, value).view(query.shape[0], query.shape[1], queries, value.shape[3])
    return output.transpose(1, 2).contiguous()


class Attachment:
    """A model under our attention. As a context manager it restores the model's own attention on exit."""

    def __init__(self, model: PreTrainedModel, restore: str | None, backends: dict[int, str]):
        self.model, self._restore, self._backends = model, restore, backends

    def detach(self) -> None:
        """Give the model back what it had: its own attention, or the backend chosen by whoever attached it before."""
        if self._restore is not None and self.model.config._attn_implementation == NAME:
            self.model.set_attn_implementation(self._restore)
        _backend_of.update(self._backends)
        self._restore, self._backends = None, {}

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


def attach(model: PreTrainedModel, *, attn_implementation: str | None = None) -> Attachment:
    """Select our attention function and mask for this model; its weights and modules stay untouched.

    attn_implementation: backend of dense prompt attention: "sdpa", "eager" or "flash_attention_2"; by default the one
    that the model was loaded with. `with kvfoundry.attach(model): ...` restores on exit.
    Raises UnsupportedModelError, by name, for families that do not go through transformers' attention interface.
    """
    before = model.config._attn_implementation
    own = before == NAME
    chosen = attn_implementation or (_backend_of.get(id(model.config), "sdpa") if own else _known(before))
    backend(chosen)
    if not own:
        _check_family(model)
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, prompt_mask)
        model.set_attn_implementation(NAME)
    backends = {id(config): _backend_of[id(config)] for config in _configs(model) if own and id(config) in _backend_of}
    for config in _configs(model):
        if config._attn_implementation != NAME:
            model.set_attn_implementation(before)
            raise UnsupportedModelError(_not_served(model, "does not go through transformers' attention interface"))
        if id(config) not in _backend_of:
            weakref.finalize(config, _backend_of.pop, id(config), None)
        _backend_of[id(config)] = chosen
    return Attachment(model, None if own else before, backends)


def backend_of(model: PreTrainedModel) -> str:
    """The backend of dense prompt attention that an attached model uses."""
    return _backend_of[id(model.config)]


def _known(implementation: str | None) -> str:
    return implementation if implementation in ("eager", "flash_attention_2") else "sdpa"


def _configs(model: PreTrainedModel) -> list[Any]:
    """Every config that a text decoder of this model reads its attention implementation from."""
    found = {id(module.config): module.config for module in model.modules() if isinstance(module, PreTrainedModel)}
    return list(found.values())


def _check_family(model: PreTrainedModel) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(_not_served(model, "is an encoder-decoder"))
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(_not_served(model, "does not go through transformers' attention interface"))
    if not model._supports_default_dynamic_cache():  # type: ignore[operator]
        raise UnsupportedModelError(_not_served(model, "brings a cache class of its own"))
    if model.config.model_type in _LEAKS_PADDING:
        raise UnsupportedModelError(_not_served(model, "lets padding run through its recurrent layers"))
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(_not_served(model, "shares keys and values between layers by itself"))


def family_of(model: PreTrainedModel) -> str:
    """Name of a model family for messages."""
    return f"{type(model).__name__} (model_type {model.config.model_type!r})"


def _not_served(model: PreTrainedModel, reason: str) -> str:
    return (
        f"{family_of(model)} {reason}; kvfoundry serves decoder-only families that do, such as llama, mistral, qwen2, "
        "qwen3, gemma2, gemma3, mixtral, phi3 and gpt_oss (the list is in docs/families.md)."
    )
