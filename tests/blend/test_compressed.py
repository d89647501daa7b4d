"""Chunks that were stored compressed: rows that are absent stay absent, codes are read, and both blend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import random_ids
from transformers import PreTrainedModel

import kvfoundry
from kvfoundry import compat
from kvfoundry.blend import blend_chunks
from kvfoundry.chunks import ChunkKV

from .support import asked, passages, read_all

Models = Callable[..., PreTrainedModel]
LENGTHS = (14, 20, 17)
QUESTION = random_ids(4, seed=99)
EVICTING = [
    "l2norm(budget=6, skip_layers=0)",
    "adakv(budget=6, window=2)",
    "snapkv(budget=6, window=2, granularity=query_head)",
]


def stored(chunks: list[ChunkKV], layer: int) -> list[list[int]]:
    """Token indices in the prompt that every head of a layer has rows of."""
    heads: list[list[int]] = [[] for _ in chunks[0].layers[layer].lengths]
    at = 0
    for chunk in chunks:
        positions = chunk.layers[layer].rows().head_positions[0]
        for head, own in zip(heads, positions, strict=True):
            head += [at + int(token) for token in own if token >= 0]
        at += len(chunk.token_ids)
    return heads


@pytest.mark.parametrize("method", EVICTING)
@pytest.mark.parametrize(
    "spec", ["blend(ratio=0)", "blend(ratio=0.4)", "blend(ratio=0.4, update=all)", "blend(ratio=1.0)"]
)
def test_absent_rows_stay_absent(method: str, spec: str, tiny_model: Models) -> None:
    model = tiny_model("llama")
    chunks = read_all(model, passages(LENGTHS), method=method)
    blended = blend_chunks(model, [chunks], [QUESTION], blend=spec)
    assert blended.exact == [0]
    for number, layer in enumerate(blended.cache.attention_layers):
        held = [[int(token) for token in head if token >= 0] for head in layer.positions[0]]
        assert held == stored(chunks, number)
        assert int(layer.lengths.sum()) == sum(int(chunk.layers[number].lengths.sum()) for chunk in chunks)
    assert torch.isfinite(asked(model, blended)).all()


@torch.no_grad()
def test_ratio_one_keeps_the_stored_places_of_a_full_prefill(tiny_model: Models) -> None:
    """What is recomputed reads every token, as a prompt does before a method acts on it."""
    model, parts = tiny_model("llama"), passages(LENGTHS)
    chunks = read_all(model, parts, method="l2norm(budget=6, skip_layers=0)")
    blended = blend_chunks(model, [chunks], [QUESTION], blend="blend(ratio=1.0)")
    full = kvfoundry.KVCache(model)
    model(torch.cat(parts)[None], use_cache=True, **{compat.CACHE_ARGUMENT: full})
    for ours, whole in zip(blended.cache.attention_layers, full.attention_layers, strict=True):
        at = ours.positions[0, ..., None].expand(-1, -1, ours.keys.shape[-1])
        torch.testing.assert_close(ours.keys[0], whole.keys[0].gather(1, at), rtol=0.0, atol=1e-5)
        torch.testing.assert_close(ours.values[0], whole.values[0].gather(1, at), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    "method", ["int8(group=4)", "kivi(bits=4, group=4, residual=4)", "rotate()+int8(group=4)", "fp8(residual=0)"]
)
def test_codes_blend_within_what_they_lose(method: str, tiny_model: Models) -> None:
    model, parts = tiny_model("llama"), passages((70, 66, 68))  # codes are written in strides of up to 64 tokens
    whole, coded = read_all(model, parts), read_all(model, parts, method=method)
    apart = {}
    for spec in ("blend(ratio=0)", "blend(ratio=0.5)", "blend(ratio=1.0)"):
        both = [blend_chunks(model, [chunks], [QUESTION], blend=spec) for chunks in (whole, coded)]
        assert both[1].exact == [0]
        plain, lossy = (asked(model, blended) for blended in both)
        apart[spec] = float((plain - lossy).norm() / plain.norm())
    assert apart["blend(ratio=0)"] < 0.2
    assert apart["blend(ratio=1.0)"] < 1e-5  # nothing of the codes is left
    assert apart["blend(ratio=0.5)"] < apart["blend(ratio=0)"]


def test_a_batch_mixes_whole_and_compressed_chunks(tiny_model: Models) -> None:
    model, parts = tiny_model("llama"), passages((9, 12))
    whole = read_all(model, parts)
    sparse = read_all(model, parts, method="snapkv(budget=4, window=2, granularity=query_head)")
    rows: list[list[Any]] = [whole, [whole[0], sparse[1]], sparse[:1]]
    together = asked(model, blend_chunks(model, rows, [QUESTION] * 3, blend="blend(ratio=0.3)"))
    for row, own in enumerate(rows):
        alone = asked(model, blend_chunks(model, [own], [QUESTION], blend="blend(ratio=0.3)"))[0]
        torch.testing.assert_close(together[row], alone, rtol=0.0, atol=1e-4)
