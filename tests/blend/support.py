"""Prompts of chunks on tiny models, and what stock transformers makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tiny_models import random_ids
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvfoundry import compat
from kvfoundry.blend import Blended, blend_chunks
from kvfoundry.chunks import ChunkKV
from kvfoundry.chunks.passage import read_passage


def passages(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Token ids of passages of these lengths."""
    return [random_ids(length, seed=seed + 7 * number + length) for number, length in enumerate(lengths)]


@torch.no_grad()
def full_logits(model: PreTrainedModel, ids: Tensor, last: int) -> Tensor:
    """Logits [last, vocabulary] at the end of a prompt that is read whole."""
    return model(ids[None]).logits[0, -last:]


@torch.no_grad()
def asked(model: PreTrainedModel, blended: Blended) -> Tensor:
    """Logits [batch, tokens, vocabulary] of the questions, read on a fork of the blended cache."""
    mask = torch.cat([blended.context_mask, blended.question_mask], dim=1)
    width = blended.question_ids.shape[1]
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -width:]
    cache = {compat.CACHE_ARGUMENT: blended.cache.fork()}
    return model(blended.question_ids, attention_mask=mask, position_ids=positions, use_cache=True, **cache).logits


def blended_logits(
    model: PreTrainedModel, chunks: Sequence[ChunkKV], question: Tensor, blend: Any, method: str | None = None
) -> Tensor:
    """Logits [tokens, vocabulary] of one question behind blended chunks."""
    return asked(model, blend_chunks(model, [chunks], [question], blend=blend, method=method))[0]


@torch.no_grad()
def selective_reference(
    model: PreTrainedModel, parts: Sequence[Tensor], question: Tensor, chosen: Sequence[int], window: int | None = None
) -> Tensor:
    """What blending should say, from stock transformers alone: logits [tokens, vocabulary] of the question.

    Every passage is read alone at its place in the prompt; the rows of all tokens but the chosen ones go into a stock
    cache. The chosen tokens are fed on top of it, then the question, both under a mask that goes by positions.
    """
    whole = torch.cat(list(parts))
    kept = torch.tensor([token not in set(chosen) for token in range(len(whole))])
    reused = reused_rows(model, parts, kept)
    there = torch.arange(len(whole))[kept]
    for tokens in (torch.tensor(list(chosen), dtype=torch.long), torch.arange(len(whole), len(whole) + len(question))):
        if not len(tokens):
            continue
        there = torch.cat([there, tokens])
        seen = there <= tokens[:, None]
        if window is not None:
            seen &= there > tokens[:, None] - window
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        ids = torch.cat([whole, question])[tokens]
        output = model(ids[None], mask, tokens[None], use_cache=True, **{compat.CACHE_ARGUMENT: reused})
    return output.logits[0]


@torch.no_grad()
def reused_rows(model: PreTrainedModel, parts: Sequence[Tensor], kept: Tensor | None = None) -> DynamicCache:
    """A stock cache of the rows of passages, each read alone at its place in the prompt. kept: of which tokens."""
    reused, at = DynamicCache(), 0
    kept = torch.ones(sum(map(len, parts)), dtype=torch.bool) if kept is None else kept
    rows: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for part in parts:
        alone = DynamicCache()
        places = torch.arange(at, at + len(part))
        model(part[None], position_ids=places[None], use_cache=True, **{compat.CACHE_ARGUMENT: alone})
        for layer, held in enumerate(alone.layers):
            stays = kept[places]
            rows.setdefault(layer, []).append((held.keys[:, :, stays], held.values[:, :, stays]))
        at += len(part)
    for layer, found in rows.items():
        reused.update(*(torch.cat(side, dim=2) for side in zip(*found, strict=True)), layer)
    return reused


def read_all(model: PreTrainedModel, parts: Sequence[Tensor], **how: Any) -> list[ChunkKV]:
    """The chunk of every passage."""
    return [read_passage(model, part, **how) for part in parts]
