"""The pattern of every head of a model for minference, searched once on a text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvfoundry import compat
from kvfoundry.attention import attach, family_of
from kvfoundry.cache import KVCache
from kvfoundry.calibration import identity_of
from kvfoundry.checks import whole
from kvfoundry.devices import input_device
from kvfoundry.errors import DataError, UnsupportedModelError
from kvfoundry.kernels.sparse_prefill import Tiles
from kvfoundry.layer import CacheLayer
from kvfoundry.layouts.base import Reading
from kvfoundry.sparse_prefill.patterns import Pattern, Sight
from kvfoundry.sparse_prefill.prefill import SparsePrefill
from kvfoundry.sparse_prefill.search import candidates, output_errors
from kvfoundry.sparse_prefill.table import PatternTable


@torch.inference_mode()
def search_patterns(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str,
    *,
    tokens: int = 4096,
    cost: int = 1024,
    samples: int = 256,
    tile: int = 128,
    block: int = 64,
    on_layer: Callable[[int, int], None] | None = None,
) -> PatternTable:
    """The pattern that serves each query head best among several that all compute `cost` rows for a tile of queries.

    The first `tokens` tokens of the text are read once with dense attention; in every full-attention layer `samples`
    queries, evenly spread, are answered again under each candidate, and a head takes the one whose output is nearest to
    the dense one (squared distance). See `kvfoundry.sparse_prefill.search.candidates` for the candidates; tile, block:
    as in minference, which has to be given the same. on_layer: called with layers done and layers in all.
    Raises DataError when the text is too short, or so short that every candidate reads all of it; SpecError for a cost
    that leaves nothing to choose; UnsupportedModelError for a model without full-attention layers.
    """
    whole("tokens", tokens, least=2)
    whole("samples", samples, least=1)
    choices = candidates(cost, tile, block)
    SparsePrefill(choices[0], None, tile, block)  # checks the sizes
    if cost >= tokens:
        raise DataError(f"a text of {tokens} tokens is read whole at a cost of {cost} rows; give more tokens.")
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :tokens]
    if ids.shape[1] < tokens:
        raise DataError(f"the text has {ids.shape[1]} tokens, fewer than {tokens}; give more, or --tokens.")
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise DataError(f"tokens={tokens} is more than the {limit} positions of {family_of(model)}.")
    errors: dict[int, Tensor] = {}
    with attach(model):
        cache = KVCache(model)
        layers = [layer for layer in cache.attention_layers if layer.rule.span is None]
        if not layers:
            raise UnsupportedModelError(
                f"{family_of(model)} has no full-attention layer whose patterns could be searched."
            )
        queries = torch.linspace(0, tokens - 1, min(samples, tokens)).round().long()
        for layer in layers:
            layer.watch = partial(_measure, errors, choices, queries, tile, block, on_layer, len(layers))
        model(ids.to(input_device(model)), use_cache=True, logits_to_keep=1, **{compat.CACHE_ARGUMENT: cache})
    patterns = tuple(
        tuple(choices[number] for number in errors[layer.layer_idx].argmin(dim=0).tolist()) for layer in layers
    )
    every = torch.stack([errors[layer.layer_idx] for layer in layers])
    about = {
        "tokens": tokens, "cost": cost, "samples": len(queries), "tile": tile, "block": block,
        "mean_error": round(float(every.amin(dim=1).mean()), 6),
        "mean_error_of_each": {repr(choice): round(float(every[:, i].mean()), 6) for i, choice in enumerate(choices)},
    }  # fmt: skip
    return PatternTable(patterns, tuple(identity_of(model).items()), about=about)


def _measure(
    errors: dict[int, Tensor],
    choices: list[Pattern],
    queries: Tensor,
    tile: int,
    block: int,
    on_layer: Callable[[int, int], None] | None,
    count: int,
    layer: CacheLayer,
    query: Tensor,
    positions: Tensor,
    reading: Reading,
    module: nn.Module | None,
) -> None:
    assert layer.rows is not None
    view = layer.rows.view()
    tiles = Tiles.of(view.lengths, torch.tensor([query.shape[2]]), tile, block, query.device)
    sight = Sight(query, view.keys, tiles, reading.scaling, reading.softcap, reading.sinks)
    errors[layer.layer_idx] = output_errors(sight, view.values, choices, queries.to(query.device)).cpu()
    if on_layer is not None:
        on_layer(len(errors), count)
