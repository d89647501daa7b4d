"""The differences between transformers 5.17 and 5.24, in one place."""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version
from transformers import cache_utils

# The keyword of the cache in `forward` and `generate`. Until 5.23 the new name is swallowed without a word, from 5.24
# the old one warns; callers of ours never have to know.
CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24.0.dev0") else "past_key_values"


def layer_types(config: Any) -> list[tuple[str, dict[str, Any]]]:
    """(layer type, keyword arguments of its stock cache layer) for every layer of a text config.

    From 5.19 transformers returns the arguments per layer, before that one dict for all.
    """
    types, kwargs = cache_utils.get_layer_types_and_kwargs(config)
    per_layer = kwargs if isinstance(kwargs, list) else [kwargs] * len(types)
    return list(zip(types, per_layer, strict=True))


def stock_layer(layer_type: str, kwargs: dict[str, Any]) -> Any | None:
    """transformers' own cache layer of this type, None when it has none."""
    layer_class = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING.get(layer_type)
    return None if layer_class is None else layer_class(**kwargs)
