"""Helpers of the law tests: specs for whatever is registered, and forward passes in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tiny_models import KV_HEADS, LAYERS
from torch import Tensor
from transformers import PreTrainedModel

import kvfoundry
from kvfoundry.errors import SpecError
from kvfoundry.method import Method
from kvfoundry.registry import REQUIRED, MethodInfo
from kvfoundry.selection.budgets import UniformBudget, UniformHeads

# Values for parameters by name, small enough for tiny prompts. A parameter that is not here keeps its default.
SMALL: dict[str, Any] = {
    "window": 4, "sinks": 2, "recent": 3, "kernel": 3, "skip_layers": 0, "every": 3, "floor": 0.2, "beta": 2,
    "chunk": 4, "size": 4, "lag": 6, "future": 8, "buffer": 4, "proxies": 3, "history": 4, "merge": 4, "page": 4,
}  # fmt: skip
# What codecs call by a name that other methods use for something else.
CODED: dict[str, Any] = {"group": 4, "residual": 8, "block": 3, "rank": 2}
# Sizes under which a prompt of a few dozen tokens leaves much of its attention out.
SPARSE: dict[str, Any] = {"vertical": 4, "slash": 3, "tile": 4, "block": 2}


def small_call(info: MethodInfo, budget: int | float, layers: int, heads: int, **given: Any) -> str:
    """`name(parameter=value, ...)` of a registered name; fails when a required parameter has no small value here."""
    table = tuple(tuple(1.0 + (layer + 2 * head) % 3 for head in range(heads)) for layer in range(layers))
    own = {**(CODED if "codec" in info.axes else {}), **(SPARSE if "prefill" in info.axes else {})}
    values = {"budget": budget, "table": table, **SMALL, **own, **given}
    chosen = {name: values[name] for name in info.parameters if name in values}
    for name, default in info.parameters.items():
        assert default is not REQUIRED or name in chosen, f"{info.name}: teach SMALL a value for {name!r}"
    return f"{info.name}({', '.join(f'{name}={value!r}' for name, value in chosen.items())})"


def small_spec(
    name: str, budget: int | float = 12, *, layers: int = LAYERS, heads: int = KV_HEADS, **given: Any
) -> str:
    """A spec that runs, for a registered method or piece; a piece gets the method that it can refine.

    layers, heads: full-attention layers and KV heads of the model, for methods with a table of heads.
    """
    info = kvfoundry.methods()[name]
    call = small_call(info, budget, layers, heads, **given)
    if info.kind == "method":
        return call
    for base in ("fullkv", "int4"):
        try:
            return str(Method.parse(f"{base}+{call}"))
        except SpecError:
            continue
    return f"{small_spec('snapkv', budget)}+{call}"


def keeps_exactly(method: Method) -> bool:
    """Whether every head of every layer keeps the same number of single rows."""
    return type(method.budget) is UniformBudget and type(method.heads) is UniformHeads and method.unit is None


METHODS = {name: Method.parse(small_spec(name)) for name in kvfoundry.methods()}
# Methods that need more than forward passes (a second pass over the prompt) act in kvfoundry.generate only; those that
# merge layers need two of one kind, and have their laws in tests/methods/test_minicache.py.
NAMES = [name for name, method in METHODS.items() if method.reconstructs is None and method.pairs is None]
SECOND_PASS = [name for name, method in METHODS.items() if method.reconstructs is not None]
# Methods and pieces whose recipe drops rows.
EVICTING = [name for name in NAMES if METHODS[name].evicts]
BUDGETED = [name for name in EVICTING if METHODS[name].takes_budget]


# Methods whose scores need nothing but the tensors of a layer.
BY_HAND = [name for name in NAMES if METHODS[name].needs_model is None]


def crossed(names: list[str], families: Iterable[str]) -> list[tuple[str, str]]:
    """(name, family) pairs: every method on every family."""
    kinds = list(families)
    return [(name, family) for name in names for family in kinds]


def granularities(names: list[str]) -> list[tuple[str, dict[str, str]]]:
    """(name, parameters) pairs: each granularity of the methods that have one, the others as they are."""
    granular = {name for name in names if "granularity" in kvfoundry.methods()[name].parameters}
    every = [(name, {"granularity": kind}) for name in names if name in granular for kind in ("kv_head", "query_head")]
    return every + [(name, {}) for name in names if name not in granular]


def kept_average(cache: kvfoundry.KVCache) -> float:
    """Rows per head over batch, heads and the layers that evict."""
    return float(torch.stack([layer.lengths.float().mean() for layer in cache.attention_layers if layer.evicts]).mean())


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
