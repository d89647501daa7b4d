"""Helpers of the law tests: specs for whatever is registered, and forward passes in pieces."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import LAYERS, QUERY_HEADS
from torch import Tensor
from transformers import PreTrainedModel

import kvfoundry
from kvfoundry.errors import SpecError
from kvfoundry.method import Method
from kvfoundry.registry import REQUIRED, MethodInfo

# Values for parameters by name, small enough for tiny prompts. A parameter that is not here keeps its default.
SMALL: dict[str, Any] = {"window": 4, "sinks": 2, "recent": 3, "kernel": 3, "skip_layers": 0, "every": 3}
SMALL |= {"proxies": 3, "history": 4, "merge": 4, "page": 4}
SMALL |= {"lag": 4, "chunk": 3, "size": 3, "future": 8, "buffer": 3}
# What codecs call by a name that other methods use for something else.
CODED: dict[str, Any] = {"group": 4, "residual": 8, "block": 3}
SMALL["table"] = tuple(tuple(1.0 + (3 * head + layer) % 5 for head in range(QUERY_HEADS)) for layer in range(LAYERS))


def small_call(info: MethodInfo, budget: int | float, **given: Any) -> str:
    """`name(parameter=value, ...)` of a registered name; fails when a required parameter has no small value here."""
    values = {"budget": budget, **SMALL, **(CODED if "codec" in info.axes else {}), **given}
    chosen = {name: values[name] for name in info.parameters if name in values}
    for name, default in info.parameters.items():
        assert default is not REQUIRED or name in chosen, f"{info.name}: teach SMALL a value for {name!r}"
    return f"{info.name}({', '.join(f'{name}={value!r}' for name, value in chosen.items())})"


def small_spec(name: str, budget: int | float = 12, **given: Any) -> str:
    """A spec that runs, for a registered method or piece; a piece gets the method that it can refine."""
    info = kvfoundry.methods()[name]
    call = small_call(info, budget, **given)
    if info.kind == "method":
        return call
    for base in ("fullkv", "int4"):
        try:
            return str(Method.parse(f"{base}+{call}"))
        except SpecError:
            continue
    return f"{small_spec('snapkv', budget)}+{call}"


def _needs_more_than_a_layer(method: Method) -> bool:
    """Reconstruction needs token ids beside the tensors of a call, merged pairs two layers of one kind.

    Their laws are in tests/methods/test_kvzip.py and tests/methods/test_minicache.py.
    """
    return method.reconstructs is not None or method.pairs is not None


NAMES = [name for name in kvfoundry.methods() if not _needs_more_than_a_layer(Method.parse(small_spec(name)))]
# Methods and pieces whose recipe drops rows, and those among them with a budget.
EVICTING = [name for name in NAMES if Method.parse(small_spec(name)).evicts]


@torch.inference_mode()
def forward_pieces(
    model: PreTrainedModel, cache: Any, ids: Tensor, pieces: list[int], mask: Tensor | None = None
) -> Tensor:
    """Logits [batch, tokens, vocabulary] of `ids`, fed to the cache in pieces of these sizes."""
    start, logits = cache.get_seq_length() if cache is not None else 0, []
    past = start
    for size in pieces:
        stop = start + size
        seen_mask = None if mask is None else mask[:, :stop]
        positions = None
        if mask is not None:
            positions = (mask[:, :stop].cumsum(dim=1) - 1).clamp(min=0)[:, start:stop]
        output = model(ids[:, start - past : stop - past], seen_mask, positions, cache, use_cache=cache is not None)
        logits.append(output.logits)
        start = stop
    return torch.cat(logits, dim=1)


@torch.inference_mode()
def greedy(model: PreTrainedModel, cache: Any, ids: Tensor, mask: Tensor | None = None, steps: int = 8) -> Tensor:
    """New tokens [batch, steps] of plain `model.generate`, greedy."""
    options = {} if cache is None else {"past_key_values": cache}
    mask = torch.ones_like(ids) if mask is None else mask
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, eos_token_id=None, pad_token_id=0, **options
    )
    return output[:, ids.shape[1] :]


def kept_positions(cache: kvfoundry.KVCache, row: int = 0) -> list[list[list[int]]]:
    """Token indices that every head of every layer holds for one batch row, in storage order."""
    return [[head[head >= 0].tolist() for head in layer.positions[row]] for layer in cache.attention_layers]


def random_rows(
    batch: int, query_heads: int, heads: int, tokens: int, dim: int = 16, seed: int = 0
) -> tuple[Tensor, ...]:
    """Query [batch, query_heads, tokens, dim], key and value [batch, heads, tokens, dim]."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, query_heads, tokens, dim, generator=generator)
    key = torch.randn(batch, heads, tokens, dim, generator=generator)
    value = torch.randn(batch, heads, tokens, dim, generator=generator)
    return query, key, value
