"""Caches of random rows: a step costs what it costs whatever they hold, and no prompt has to be read for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvfoundry.cache import KVCache
from kvfoundry.layer import CacheLayer
from kvfoundry.layouts import DenseRows, Layout
from kvfoundry.layouts.ragged import RaggedRows
from kvfoundry.method import Method
from kvfoundry.planning.geometry import LayerGeometry
from kvfoundry.selection.budgets import UniformHeads
from kvfoundry.selection.scores.recency import Recency


@dataclass(frozen=True)
class Maker:
    """Makes random rows of sequences of `tokens` tokens."""

    batch: int
    tokens: int
    dtype: torch.dtype
    device: torch.device

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def dense(self, heads: int, key_dim: int, value_dim: int, kept: int, columns: Sequence[str] = ()) -> DenseRows:
        """`kept` rows of every head, spread over the sequence. columns: statistics that come with each row."""
        lengths = torch.full((self.batch, heads), kept)
        positions = (torch.arange(kept, device=self.device) * self.tokens // kept).int()
        found = {name: torch.rand(self.batch, heads, kept, device=self.device) for name in columns}
        keys, values = (self._random(self.batch, heads, kept, dim) for dim in (key_dim, value_dim))
        return DenseRows(keys, values, positions.expand(self.batch, 1, kept).contiguous(), lengths, found)

    def ragged(self, heads: int, key_dim: int, value_dim: int, kept: int) -> RaggedRows:
        """Uneven heads, `kept` rows each on average."""
        shares = torch.rand(self.batch, heads, generator=torch.Generator().manual_seed(kept)) ** 3 + 0.05
        counts = (shares / shares.sum(dim=1, keepdim=True) * kept * heads).long().clamp(max=self.tokens)
        counts[:, -1] += kept * heads - counts.sum(dim=1)
        slots = int(counts.sum())
        places = torch.cat([torch.arange(int(n)) * self.tokens // int(n) for n in counts.flatten()]).int()
        keys, values = (self._random(slots, dim) for dim in (key_dim, value_dim))
        return RaggedRows(keys, values, places.to(self.device), counts, counts.clone(), {})


def filled(
    model: PreTrainedModel,
    method: str | Method | None,
    tokens: int,
    rows: Callable[[CacheLayer], Layout],
    like: KVCache | None = None,
) -> KVCache:
    """A cache that has seen a prompt of `tokens` tokens, of which it holds `rows` of every layer.

    A codec writes them down, one without knowledge of queries. like: a cache whose rows are taken instead.
    """
    cache = KVCache(model, method)
    cache.expect_prompt(tokens)
    for number, layer in enumerate(cache.attention_layers):
        if like is not None:
            other = like.attention_layers[number].rows
            assert other is not None
            held = other.shared()
        else:
            held = rows(layer)
            view = held.view() if cache.method.codec is not None and layer.rule.span is None else None
            codec = None if view is None else layer.codec_for(view.keys.shape[-1], view.values.shape[-1])
            if view is not None and codec is not None:
                held = codec.store(view, None)
        layer.hold(held, tokens, held.lengths.shape[1])
    return cache


def refusal(method: Method) -> str | None:
    """Why random rows cannot stand for what a method keeps of a prompt, so that one has to be read; else None."""
    if method.schedule.every is not None and not isinstance(method.score, Recency):
        return "its choice in decode goes on from statistics of the prompt"
    if method.pairs is not None or method.dispose is not None:
        return "its rows are made of several"
    if method.granularity != "kv_head":
        return "it may keep rows for every query head"
    if method.codec is not None and (method.codec.needs_rope or method.codec.window or method.budget is not None):
        return "its codes depend on the rows"
    return None


def of_method(
    model: PreTrainedModel, method: Method, layers: dict[int, LayerGeometry], batch: int, tokens: int
) -> KVCache:
    """A cache of random rows as the method leaves them. layers: `planning.geometry` of the model."""
    maker = Maker(batch, tokens, model.dtype, model.device)
    geometries = iter([layers[number] for number in sorted(layers)])

    def rows(layer: CacheLayer) -> Layout:
        geometry, kept = next(geometries), tokens
        sizes = geometry.kv_heads, geometry.key_dim, geometry.value_dim
        if layer.acts and method.budget is not None:
            granted = layer.method.budget.rows(torch.tensor([tokens]), layer.layer_idx, layer.num_layers)  # type: ignore[union-attr]
            kept = min(tokens, int(granted))
            if kept < tokens and not isinstance(method.heads, UniformHeads):
                return maker.ragged(*sizes, kept)
        return maker.dense(*sizes, kept)

    return filled(model, method, tokens, rows)


def of_transformers(model: PreTrainedModel, layers: dict[int, LayerGeometry], batch: int, tokens: int) -> DynamicCache:
    """transformers' own cache of random rows."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for number, layer in sorted(layers.items()):
        keys, values = (
            torch.randn(batch, layer.kv_heads, tokens, dim, device=model.device, dtype=model.dtype)
            for dim in (layer.key_dim, layer.value_dim)
        )
        cache.update(keys, values, number)
    return cache
