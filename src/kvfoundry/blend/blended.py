"""From chunks in their order to the cache of the blended prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfoundry.blend.blending import Blending, Context
from kvfoundry.blend.placing import Feed, placed
from kvfoundry.blend.ropes import ropes_of
from kvfoundry.blend.spec import Blend
from kvfoundry.cache import KVCache
from kvfoundry.chunks import ChunkKV
from kvfoundry.errors import DataError, SpecError
from kvfoundry.method import Method


@dataclass(frozen=True, eq=False)
class Blended:
    """A blended batch of prompts. cache: an ordinary one that has read the context; the questions come next.

    context_ids, context_mask: [batch, tokens] what it has read, left-padded; question_ids, question_mask: what comes
    next, left-padded too. recomputed: token indices of every batch row that were computed anew, on the CPU. exact:
    leading tokens of every batch row whose reused rows are those of a full prefill.
    """

    cache: KVCache
    blend: Blend
    context_ids: Tensor
    context_mask: Tensor
    question_ids: Tensor
    question_mask: Tensor
    recomputed: list[Tensor]
    exact: list[int]

    @property
    def recomputed_tokens(self) -> list[int]:
        """How many tokens of every batch row were computed anew."""
        return [len(tokens) for tokens in self.recomputed]


@torch.inference_mode()
def blend_unchecked(
    model: PreTrainedModel,
    chunks: Sequence[Sequence[ChunkKV]],
    questions: Sequence[Sequence[int] | Tensor] | None,
    blend: Blend,
    method: str | Method | None = None,
) -> Blended:
    """As `blend_chunks`, without asking whether the model can be blended at all."""
    cache = ready_cache(model, blend, method)
    if not chunks or not all(chunks):
        raise DataError("there are no chunks to blend; give at least one for every prompt.")
    rows = [[chunk.plain(model) for chunk in own] for own in chunks]
    following = [torch.as_tensor(ids, dtype=torch.long).cpu() for ids in questions or [[] for _ in rows]]
    if len(following) != len(rows):
        raise DataError(f"{len(following)} questions for {len(rows)} prompts; give one each.")
    if blend.select.asks and not all(map(len, following)):
        raise DataError(f"select={blend.select.name} chooses by the question; give the one that will be asked.")
    context = Context([placed(own) for own in rows], following)
    with Feed(context.pieces, ropes_of(model, cache), cache.devices(model), context.whole_length) as feed:
        blending = Blending(model, context, cache, feed)
        chosen = blend.select.choose(blending, blend.ratio)
        blending.finish(chosen, corner_from=blend.corner_from)
    cache.prompt.start = int(context.lengths.max())
    context_ids, context_mask = left_padded(context.ids, blending.device)
    question_ids, question_mask = left_padded(following, blending.device)
    return Blended(cache, blend, context_ids, context_mask, question_ids, question_mask, chosen, blending.exact)


def ready_cache(model: PreTrainedModel, blend: Blend, method: str | Method | None) -> KVCache:
    """The empty cache that a blend will fill; SpecError where model, blend and method do not go together."""
    cache = KVCache(model, method)
    score, layers = cache.method.score, len(cache.attention_layers)
    if score is not None and score.needs_every_query:
        raise SpecError(
            f"{cache.method} scores rows by queries of every token around them, and a blended prompt has only some; "
            "compress the chunks with it, or use a method that looks from the question."
        )
    if blend.select.checks and blend.select.checks[-1] >= layers:
        raise SpecError(
            f"check={blend.select.checks[-1]} is not one of the model's attention layers 0 to {layers - 1}."
        )
    return cache


def left_padded(rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask [batch, tokens] of token ids of different lengths."""
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, own in enumerate(rows):
        ids[row, width - len(own) :] = own
        mask[row, width - len(own) :] = 1
    return ids.to(device), mask.to(device)
