"""Caches of one prompt side by side in one batch: its rows are independent, so each goes on as it would alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields

from transformers import PreTrainedModel

from kvfoundry.cache import KVCache
from kvfoundry.layer import CacheLayer
from kvfoundry.method import Method
from kvfoundry.together.prompt import layers_at

_NOT_COMPARED = ("calls", "budget")


def kinship(cache: KVCache) -> Hashable | None:
    """What must agree for caches of one prompt to be decoded in one batch; None for one that has to go on alone.

    After the prompt, a method that does nothing more than store and read leaves plain rows, whatever it was. One that
    goes on evicting is joined with itself under other budgets.
    """
    method, layers = cache.method, cache.attention_layers
    if method.lossy or method.read is not None or method.slot_positions or method.placement is not None:
        return None
    heads = tuple(layer.lengths.shape[1] for layer in layers)
    if method.schedule.every is None and method.unread_distance is None:
        return heads
    if method.parks or any(layer.acts and not layer.rows_lost_at for layer in layers):
        return None  # what is on the host, and a first eviction yet to come, are told of one cache alone
    return heads, tuple(getattr(method, axis.name) for axis in fields(Method) if axis.name not in _NOT_COMPARED)


def joined(model: PreTrainedModel, caches: Sequence[KVCache]) -> KVCache:
    """One cache with the batch rows of all, one cache after the other; they must be of one `kinship`.

    It holds copies: the caches may be dropped. Its bytes are those of a rectangle that is as wide as the longest row.
    """
    first = caches[0]
    goes_on = first.method.schedule.every is not None
    result = KVCache(model, first.method if goes_on else None)
    result.prompt.expect(first.seen_tokens, 0)
    for number, layer in enumerate(result.layers):
        if isinstance(layer, CacheLayer):
            layer.join(layers_at(number, caches))
    return result
