"""What each attention layer of a model hands to its cache for a token, read off the model's own code.

Head sizes are not computed from a config: every family spells them in its own way, and some change them from layer to
layer. The attention modules of the outline (`kvfoundry.models.architecture`, no weights) are called with three tokens
that have shapes but no numbers, up to the point where they hand over keys and values.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvfoundry import compat
from kvfoundry.attention import family_of
from kvfoundry.errors import UnsupportedModelError
from kvfoundry.rope_layout import attention_modules, handed_over, rotary_config, rotary_module
from kvfoundry.visibility import WHOLE_PAST, WindowRule


@dataclass(frozen=True)
class LayerGeometry:
    """One attention layer: KV heads, widths of a key and a value, query heads, and which past it reads."""

    kv_heads: int
    key_dim: int
    value_dim: int
    query_heads: int
    rule: WindowRule = WHOLE_PAST

    def numbers(self) -> int:
        """Numbers that one token leaves."""
        return self.kv_heads * (self.key_dim + self.value_dim)


def refuse_latent(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for multi-head latent attention (MLA), by the name of the family."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"{family_of(model)} has multi-head latent attention (MLA, kv_lora_rank={config.kv_lora_rank}): it keeps "
            "one latent per token instead of keys and values per head, which kvfoundry does not serve; "
            "docs/families.md lists the families that it does."
        )


def geometry(model: PreTrainedModel) -> dict[int, LayerGeometry]:
    """Layer index -> its geometry, for the layers that hold keys and values.

    model: an outline on the meta device, or a loaded model.
    Raises UnsupportedModelError for latent attention and for attention that cannot be asked.
    """
    refuse_latent(model)
    config = model.config.get_text_config(decoder=True)
    query_heads = getattr(config, "num_attention_heads", 1)
    rules = {i: rule for i, kind in enumerate(compat.layer_types(config)) if (rule := _rule(*kind)) is not None}
    shapes = _from_modules(model, rules)
    if set(rules) - set(shapes):
        shapes = _from_a_pass(model) | shapes
    if missing := sorted(set(rules) - set(shapes)):
        raise UnsupportedModelError(
            f"{family_of(model)}: what layer {missing[0]} stores cannot be read off its attention module, so its cache "
            "cannot be sized before it is loaded."
        )
    found = {}
    for i, rule in rules.items():
        (kv_heads, key_dim), value_dim = shapes[i]
        found[i] = LayerGeometry(kv_heads, key_dim, value_dim, max(query_heads, kv_heads), rule)
    return found


def _rule(kind: str, arguments: dict[str, Any]) -> WindowRule | None:
    """The window of a layer of this type; None for one that holds no keys and values."""
    if kind == "sliding_attention":
        return WindowRule(sliding=arguments["sliding_window"])
    if kind == "chunked_attention":
        return WindowRule(chunked=arguments["sliding_window"])
    return WHOLE_PAST if kind == "full_attention" else None


# ((KV heads, width of a key), width of a value)
_Shapes = dict[int, tuple[tuple[int, int], int]]


def _shape(keys: Tensor, values: Tensor) -> tuple[tuple[int, int], int]:
    return (keys.shape[1], keys.shape[3]), values.shape[3]


def _from_modules(model: PreTrainedModel, rules: dict[int, WindowRule]) -> _Shapes:
    """Of the layers whose attention module can be called by itself."""
    rotary = rotary_module(model)
    if rotary is None:
        return {}
    found: _Shapes = {}
    hidden = torch.empty(
        1, 3, model.config.get_text_config(decoder=True).hidden_size, device=model.device, dtype=model.dtype
    )
    positions = torch.arange(3, device=model.device)[None]
    for i, attention in attention_modules(model).items():
        if i not in rules:
            continue
        try:
            tables = rotary(hidden, positions, *_layer_type(rotary, i))
            found[i] = _shape(*handed_over(attention, hidden, tables))
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError, NotImplementedError):
            continue  # the whole model is asked next
    return found


def _layer_type(rotary: nn.Module, layer_idx: int) -> tuple[str, ...]:
    if "layer_type" in inspect.signature(type(rotary).forward).parameters:
        return (rotary_config(rotary).layer_types[layer_idx],)
    return ()


class _Recorder(DynamicCache):
    """Keeps the shapes of what every layer stores."""

    def __init__(self, config: Any):
        super().__init__(config=config)
        self.shapes: _Shapes = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.shapes[layer_idx] = _shape(key_states, value_states)
        return key_states, value_states


@torch.no_grad()
def _from_a_pass(model: PreTrainedModel) -> _Shapes:
    """Of the layers that a forward pass reaches; on the meta device it ends where the model looks at a number."""
    recorder = _Recorder(model.config.get_text_config(decoder=True))
    try:
        model(
            torch.zeros(1, 3, dtype=torch.long, device=model.device),
            use_cache=True,
            **{compat.CACHE_ARGUMENT: recorder},
        )
    except Exception as error:  # whatever comes of numbers that are not there; layers not reached are named above
        if not recorder.shapes:
            raise UnsupportedModelError(
                f"{family_of(model)}: its layers cannot be asked what they store, so its cache cannot be sized before "
                f"it is loaded ({' '.join(str(error).split())[:100]})."
            ) from error
    return recorder.shapes
