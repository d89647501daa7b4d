"""An independent replay of a generation.

The model's own forward over all tokens at once, without any cache, where every query may see exactly the rows that the
cache held when its token came.
"""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import QUERY_HEADS
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

import kvfoundry

from .support import forward_pieces

# layer index -> boolean [batch, query heads, tokens, tokens]
_visible: dict[int, Tensor] = {}


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float = 1.0, **kwargs: Any):
    """Written out: repeated heads, soft-cap, sinks, the recorded mask."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    logits = query @ key.transpose(2, 3) * scaling
    if kwargs.get("softcap") is not None:
        logits = torch.tanh(logits / kwargs["softcap"]) * kwargs["softcap"]
    logits = logits.masked_fill(~_visible[module.layer_idx], float("-inf"))
    if kwargs.get("s_aux") is not None:
        sink = kwargs["s_aux"].view(1, -1, 1, 1).expand(logits.shape[0], -1, logits.shape[2], 1)
        weights = torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = logits.softmax(dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class Recorder:
    """Feeds tokens to a cache and writes down what every layer held before each call."""

    def __init__(self, model: PreTrainedModel, cache: kvfoundry.KVCache, tokens: int, batch: int = 1):
        self.model, self.cache = model, cache
        shape = (batch, QUERY_HEADS, tokens, tokens)
        self.visible = [torch.zeros(shape, dtype=torch.bool) for _ in cache.layers]

    def feed(self, ids: Tensor) -> Tensor:
        """Logits of one call."""
        start, count = self.cache.seen_tokens, ids.shape[1]
        for layer, visible in zip(self.cache.layers, self.visible, strict=True):
            seen = visible[:, :, start : start + count]
            seen[..., start : start + count] = torch.ones(count, count, dtype=torch.bool).tril()
            if start:
                held = layer.positions
                groups = QUERY_HEADS // held.shape[1]
                rows = torch.zeros(*held.shape[:2], seen.shape[-1] + 1, dtype=torch.bool)
                rows.scatter_(2, held.masked_fill(held < 0, seen.shape[-1]), True)
                seen[..., :start] |= rows[..., :start].repeat_interleave(groups, dim=1)[:, :, None]
            if layer.rule.span is not None:
                query, key = torch.arange(start, start + count)[:, None], torch.arange(seen.shape[-1])
                seen &= key > query - layer.rule.span
        return forward_pieces(self.model, self.cache, ids, [count])

    def replayed(self, reference: PreTrainedModel, ids: Tensor) -> Tensor:
        """Logits of the whole sequence in one call of the reference model, under the recorded visibility."""
        own = reference.config._attn_implementation
        AttentionInterface.register("replayed", _attention)
        _visible.update(enumerate(self.visible))
        reference.set_attn_implementation("replayed")
        try:
            return forward_pieces(reference, None, ids, [ids.shape[1]])
        finally:
            reference.set_attn_implementation(own)
            _visible.clear()
