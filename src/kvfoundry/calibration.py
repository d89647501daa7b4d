"""Measure, once per model, the thresholds and levels that kvquant quantizes with.

calibration = kvfoundry.calibration.calibrate(model, tokenizer, text)
calibration.save("smollm2.kvquant.safetensors")
KVCache(model, "kvquant(bits=3, calibration='smollm2.kvquant.safetensors')")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvfoundry import compat
from kvfoundry.attention import family_of
from kvfoundry.checks import flag, number, whole
from kvfoundry.codecs import kvquant
from kvfoundry.codecs.calibrated import CalibratedLayer, Calibration
from kvfoundry.codecs.nuq import fit_levels
from kvfoundry.devices import input_device
from kvfoundry.errors import DataError, UnsupportedModelError
from kvfoundry.fingerprint import fingerprint, weights_of
from kvfoundry.rope import Rope

BITS = (2, 3, 4)

# Numbers of every weight that the identity of a model is taken from.
_SAMPLE = 4096


def identity_of(model: PreTrainedModel) -> dict[str, Any]:
    """What tells this model from another: family, sizes, and a digest of a sample of every weight.

    The digest is of weights rounded to bfloat16, so that one checkpoint has one identity in every dtype it is loaded
    in; weights that are not in memory (meta device) count by their shape.
    """
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return {
        "family": config.model_type,
        "layers": config.num_hidden_layers,
        "heads": heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "weights": fingerprint(weights_of(model), sample=_SAMPLE, dtype=torch.bfloat16)[:16],
    }


class _Recorder(DynamicCache):
    """Hands keys and values on as they are, and remembers them; with gradients, makes them ask for theirs."""

    def __init__(self, config: Any, *, gradients: bool):
        super().__init__(config=config)
        self.gradients = gradients
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self.gradients:
            for tensor in (key_states, value_states):
                if not tensor.requires_grad:
                    tensor.requires_grad_()
        self.seen[layer_idx] = (key_states, value_states)
        return key_states, value_states


def calibrate(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str,
    *,
    outliers: float = 0.01,
    tokens: int = 2048,
    window: int = 512,
    fisher: bool = True,
    q_norm: bool = False,
    on_window: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Read `tokens` tokens of the text in windows of `window` and fit kvquant's tables for 2, 3 and 4 bits.

    Keys are taken before RoPE. Per key channel the thresholds are the percentiles outliers/2 and 1 - outliers/2 over
    all tokens; per layer one table of levels for keys and one for values is fitted to the normalized numbers that are
    no outliers. fisher: every number weighs as its squared gradient of the next-token loss (the paper's sensitivity),
    otherwise all weigh the same. q_norm: restored numbers keep mean and deviation.
    on_window: called with windows done and windows in all.
    Raises DataError when the text is too short; UnsupportedModelError when keys cannot be taken before RoPE.
    """
    number("outliers", outliers, least=0, most=0.5)
    whole("tokens", tokens, least=64)
    whole("window", window, least=16)
    flag("fisher", fisher)
    flag("q_norm", q_norm)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    if ids.numel() < tokens:
        raise DataError(f"the calibration text has {ids.numel()} tokens, fewer than {tokens}; give more, or --tokens.")
    config = model.config.get_text_config(decoder=True)
    full = [i for i, (kind, _) in enumerate(compat.layer_types(config)) if kind == "full_attention"]
    if not full:
        raise UnsupportedModelError(f"{family_of(model)} has no full-attention layer to calibrate.")
    ropes = {layer: Rope.of(model, layer) for layer in full}
    sample = _Sample(full)
    pieces = [piece for piece in ids[:tokens].split(window) if piece.numel() > 1]
    for done, piece in enumerate(pieces, start=1):
        sample.add(model, config, piece[None].to(input_device(model)), ropes, fisher=fisher)
        if on_window is not None:
            on_window(done, len(pieces))
    layers = tuple(sample.fitted(layer, outliers, q_norm=q_norm) for layer in full)
    about = {"tokens": tokens, "window": window, "fisher": fisher}
    return Calibration(identity_of(model), outliers, q_norm, layers, about)


class _Sample:
    """Raw keys, values and weights of every layer: lists of [heads, tokens, head_dim] on the CPU."""

    def __init__(self, layers: list[int]):
        self.parts: dict[int, list[tuple[Tensor, ...]]] = {layer: [] for layer in layers}

    def add(self, model: PreTrainedModel, config: Any, ids: Tensor, ropes: dict[int, Rope], *, fisher: bool) -> None:
        cache = _Recorder(config, gradients=fisher)
        gradients: dict[int, tuple[Tensor, Tensor]] = {}
        with torch.set_grad_enabled(fisher):
            logits = model(ids, use_cache=True, **{compat.CACHE_ARGUMENT: cache}).logits
            if fisher:
                loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum")
                inputs = [tensor for layer in self.parts for tensor in cache.seen[layer]]
                found = torch.autograd.grad(loss, inputs)
                gradients = {layer: found[2 * i : 2 * i + 2] for i, layer in enumerate(self.parts)}  # type: ignore[misc]
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device).view(1, 1, length)

        def raw(layer: int, keys: Tensor) -> Tensor:
            return ropes[layer].unrotate(keys.detach(), positions.to(keys.device), length=length)

        for layer, parts in self.parts.items():
            keys, values = cache.seen[layer]
            own = [raw(layer, keys), values.detach()]
            if fisher:  # a rotation turns gradients as it turns keys
                key_gradient, value_gradient = gradients[layer]
                own += [raw(layer, key_gradient).float() ** 2, value_gradient.float() ** 2]
            parts.append(tuple(tensor[0].float().cpu() for tensor in own))

    def fitted(self, layer: int, outliers: float, *, q_norm: bool) -> CalibratedLayer:
        keys, values, *weights = (torch.cat(parts, dim=1) for parts in zip(*self.parts[layer], strict=True))
        key_weights, value_weights = weights or (None, None)
        channels = keys.transpose(1, 2)
        lower, upper = kvquant.percentile_bounds(channels, outliers)
        key_z = kvquant.Affine.between(lower[..., None], upper[..., None]).normalized(channels)
        key_inner = ~kvquant.screened(channels, lower[..., None], upper[..., None])
        value_outliers = kvquant.exact_outliers(values, outliers, inclusive=True)
        bounds = kvquant.inner_bounds(values, value_outliers)
        value_z = kvquant.Affine.between(*(bound[..., None] for bound in bounds)).normalized(values)
        if key_weights is not None:
            key_weights = key_weights.transpose(1, 2)
        levels = {}
        for bits in BITS:
            pair = (
                _table(key_z, key_inner, key_weights, bits, q_norm=q_norm),
                _table(value_z, ~value_outliers, value_weights, bits, q_norm=q_norm),
            )
            levels[bits] = pair
        return CalibratedLayer(lower, upper, levels)


def _table(z: Tensor, inner: Tensor, weights: Tensor | None, bits: int, *, q_norm: bool) -> kvquant.Levels:
    numbers = z[inner]
    table = kvquant.Levels.plain(fit_levels(numbers, 2**bits, None if weights is None else weights[inner]))
    return table.normed(numbers) if q_norm else table
