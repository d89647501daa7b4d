"""One forward pass over a prompt for many methods: each gets the cache that it would have made of it alone.

That is exact because a layer attends to all rows of a prompt in one call before its method acts: whatever the method
then drops, codes or merges, the next layer has read the same. So one cache stores and reads, and in every layer the
others take over its rows and act on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvfoundry.attention import family_of
from kvfoundry.cache import KVCache
from kvfoundry.errors import CacheStateError, SpecError, UnsupportedModelError
from kvfoundry.layer import CacheLayer
from kvfoundry.layouts.base import Reading
from kvfoundry.method import Method
from kvfoundry.selection.evidence import Memo


class SharedPrompt(KVCache):
    """A cache to read one prompt with, in one call; `caches` are then those of the methods, ready to go on.

        prompt = kvfoundry.SharedPrompt(model, ["fullkv", "snapkv(budget=256)", "h2o(budget=256)"])
        model(**inputs, past_key_values=prompt)  # or model.generate(..., max_new_tokens=1)
        prompt.caches[1].nbytes

    Rows, statistics and bytes of every cache are those after a prompt of its own; caches that keep every row share
    their memory until one of them writes. The shared prompt itself holds nothing. A method that reads the prompt a
    second time (kvzip) still has that to do: `kvfoundry.compress_by_reconstruction`.
    Raises SpecError or UnsupportedModelError as `KVCache` does, SpecError also for methods that compute the attention
    of a prompt in different ways (minference), and UnsupportedModelError for a model whose layers hold recurrent states
    instead of rows.
    """

    def __init__(self, model: PreTrainedModel, methods: Sequence[str | Method]):
        ways = {method.prefill: method for method in map(Method.parse, methods)}
        if len(ways) > 1:
            first, second = list(ways.values())[:2]
            raise SpecError(
                f"{first} and {second} read a prompt in different ways; give each a shared prompt of its own."
            )
        super().__init__(model, Method.parse("fullkv").replace(prefill=next(iter(ways), None)))
        if len(self.attention_layers) != sum(not dummy for dummy in self._is_stateless()):
            raise UnsupportedModelError(
                f"{family_of(model)} has layers with recurrent states, which methods cannot share; give each a KVCache."
            )
        self.caches = [KVCache(model, method) for method in methods]
        self._was_read = False
        for number, layer in enumerate(self.layers):
            if isinstance(layer, CacheLayer):
                followers = layers_at(number, self.caches)
                layer.watch = partial(_lead, followers)
                layer.sums_for_others = any(follower.sums_columns for follower in followers)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Called by the model. Refuses a second call."""
        if self.layers[layer_idx] is self._first:
            if self._was_read:
                raise CacheStateError("a shared prompt is read in one call; go on with one of its caches.")
            self._was_read = True
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def layers_at(number: int, caches: Sequence[KVCache]) -> list[CacheLayer]:
    """The layers of several caches of one model at one place of it, which must hold rows."""
    found = [cache.layers[number] for cache in caches]
    return [layer for layer in found if isinstance(layer, CacheLayer)]


@torch.no_grad()
def _lead(
    followers: Sequence[CacheLayer],
    layer: CacheLayer,
    query: Tensor,
    positions: Tensor,
    reading: Reading,
    module: nn.Module | None,
) -> None:
    memo: Memo = {}
    for follower in followers:
        follower.follow(layer, query, positions, reading, module, memo)
