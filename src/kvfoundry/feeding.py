"""Prompts on their way into a model: how an answer begins, how long they may be, and the calls that read them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfoundry import compat
from kvfoundry.cache import KVCache
from kvfoundry.devices import input_device
from kvfoundry.errors import DataError


def with_answer_begun(text: str, answer_prefix: str) -> str:
    """A prompt with the beginning of its answer. White space at the prompt's end has said already that it begins."""
    return text + (answer_prefix.lstrip() if text[-1:].isspace() else answer_prefix)


def position_limit(model: PreTrainedModel) -> int | None:
    """The number of positions that the model was made for; None where its config names none."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def check_length(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int, what: str) -> None:
    """Raise DataError when prompt and answer together need more positions than the model was made for."""
    limit = position_limit(model)
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        raise DataError(
            f"{what} has {prompt_tokens} tokens and asks for {max_new_tokens} more, "
            f"but the model is limited to {limit} positions; "
            f"shorten it to at most {max(limit - max_new_tokens, 0)} tokens or ask for fewer new tokens."
        )


def feed(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, cache: KVCache, chunk: int, end: int) -> None:
    """The columns that the cache has not seen yet, up to `end`, in pieces of `chunk`.

    ids: [batch, tokens], on the CPU or on the model's device: one piece at a time is taken there. mask: None where
    nothing is padded; then a call needs memory for its own tokens alone, however long the prompt is.
    """
    device, real = input_device(model), cache.attention_layers[0].real
    if mask is not None and bool(mask.all()) and (real is None or bool((real == cache.seen_tokens).all())):
        mask = None
    for start in range(cache.seen_tokens, end, chunk):
        stop = min(start + chunk, end)
        if mask is None:
            padding, positions = None, torch.arange(start, stop, device=device).expand(ids.shape[0], -1)
        else:
            padding = mask[:, :stop].to(device)
            positions = (padding.cumsum(dim=1) - 1).clamp(min=0)[:, start:stop]
        model(
            ids[:, start:stop].to(device), attention_mask=padding, position_ids=positions,
            use_cache=True, logits_to_keep=1, **{compat.CACHE_ARGUMENT: cache},
        )  # fmt: skip
