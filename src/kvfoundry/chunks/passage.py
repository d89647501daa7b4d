"""Read a passage once and keep its KV: the chunk of token ids under any method that does not need the question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfoundry import compat
from kvfoundry.cache import KVCache
from kvfoundry.chunks.chunk import ChunkKV
from kvfoundry.devices import input_device
from kvfoundry.errors import DataError, SpecError
from kvfoundry.method import Method


@torch.inference_mode()
def read_passage(
    model: PreTrainedModel,
    token_ids: Tensor | Sequence[int],
    method: str | Method | None = None,
    *,
    context_ids: Tensor | Sequence[int] = (),
    tokenizer: Any = None,
    piece: int | None = None,
) -> ChunkKV:
    """The chunk of a passage, read at once or in pieces of `piece` tokens; the method acts on the passage alone.

    Window layers keep every row: in another prompt other queries come near.
    context_ids: what stands in front of it, a BOS for example; its rows are read and left behind. tokenizer: for
    methods that repeat the passage (kvzip). Raises SpecError for a method that streams or needs a tokenizer that is not
    there, DataError for an empty passage.
    """
    recipe = Method.parse("fullkv" if method is None else method)
    if recipe.reconstructs is not None and tokenizer is None:
        raise SpecError(f"{recipe} repeats the passage in words: give the tokenizer.")
    context = torch.as_tensor(context_ids, dtype=torch.long).flatten()
    passage = torch.as_tensor(token_ids, dtype=torch.long).flatten()
    if not len(passage):
        raise DataError("a passage without tokens leaves no rows.")
    ids = torch.cat([context, passage])[None].to(input_device(model))
    cache = KVCache(model, recipe)
    for layer in cache.attention_layers:
        layer.keeps_whole_window = True
    cache.expect_prompt(ids.shape[1])
    for part in ids.split(piece or ids.shape[1], dim=1):
        model(part, use_cache=True, logits_to_keep=1, **{compat.CACHE_ARGUMENT: cache})
    if recipe.reconstructs is not None:
        from kvfoundry.reconstruction import compress_by_reconstruction

        compress_by_reconstruction(model, tokenizer, cache, ids, torch.ones_like(ids))
    return ChunkKV.from_cache(cache, ids[0], start=len(context))
