"""A full cache whose layers show where each decoded token looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvfoundry.cache import KVCache
from kvfoundry.kernels.attention.naive import attention_weights
from kvfoundry.layer import CacheLayer

# Called with the model's layer index and the weights [query_heads, rows] of one query over all rows, float32.
Observer = Callable[[int, Tensor], None]


class ObservedLayer(CacheLayer):
    """A layer that hands the attention weights of single queries to an observer; longer calls pass unseen."""

    observer: Observer
    model_layer: int

    @classmethod
    def over(cls, layer: CacheLayer, model_layer: int, observer: Observer) -> ObservedLayer:
        """An empty layer in the place of an empty `layer`."""
        own = cls(
            layer.method,
            layer_idx=layer.layer_idx,
            num_layers=layer.num_layers,
            kernel=layer.kernel,
            family=layer.family,
            prompt=layer.prompt,
        )
        own.model_layer, own.observer = model_layer, observer
        return own

    def attend(
        self,
        query: Tensor,
        *args: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As every layer does; the query of a decode step is the newest token, so it sees every row."""
        output = super().attend(query, *args, scaling=scaling, softcap=softcap, sinks=sinks, **kwargs)
        if query.shape[2] == 1 and self.rows is not None:
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            keys = self.rows.view().keys
            weights = attention_weights(query, keys, None, scaling=scaling, softcap=softcap, sinks=sinks)
            self.observer(self.model_layer, weights[0, :, 0])
        return output


def observed_cache(model: PreTrainedModel, observer: Observer) -> KVCache:
    """A full cache for one sequence whose full-attention layers are observed; window layers are not."""
    cache = KVCache(model)
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, CacheLayer) and not layer.is_sliding:
            cache.layers[i] = ObservedLayer.over(layer, i, observer)
    return cache
