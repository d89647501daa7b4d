"""What the engine can serve, and the sentence that says why it cannot serve the rest."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfoundry.cache import KVCache
from kvfoundry.devices import is_spread
from kvfoundry.engine.paging import budget_refusal, reading_refusal
from kvfoundry.engine.replacing import replaces, sinks_of
from kvfoundry.engine.rows import Plan
from kvfoundry.layer import CacheLayer
from kvfoundry.layouts import Layout
from kvfoundry.layouts.coded import CodedRows
from kvfoundry.layouts.dense import DenseRows
from kvfoundry.layouts.kernel_codes import codec_refusal, coded_refusal
from kvfoundry.layouts.streamed import StreamedRows
from kvfoundry.layouts.streamed_codes import StreamedCodes
from kvfoundry.method import Method
from kvfoundry.reading.reader import PageReader
from kvfoundry.selection.budgets import UniformHeads
from kvfoundry.selection.choose import TopRows
from kvfoundry.selection.scores.recency import Recency


def refusal(model: PreTrainedModel, cache: KVCache) -> str | None:
    """Why this model under this cache's method is decoded by the plain loop; None where the engine serves it.

    Known before anything is computed.
    """
    return _model_refusal(model) or next(filter(None, map(_layer_refusal, cache.layers)), None)


def _model_refusal(model: PreTrainedModel) -> str | None:
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "the model takes no position_ids"
    if model.config.get_text_config(decoder=True) is not model.config:
        return "the model is one of several kinds of input"
    if is_spread(model):
        return "the model is spread over several devices"
    kinds = {_rope_kind(module) for module in model.modules()}
    changing = sorted(kind for kind in kinds if "dynamic" in kind or kind == "longrope")
    if changing:
        return f"the frequencies of its RoPE ({changing[0]}) depend on the length of the text"
    return None


def _rope_kind(module: Any) -> str:
    kind = getattr(module, "rope_type", "default")
    return " ".join(map(str, kind.values())) if isinstance(kind, dict) else str(kind)


def _layer_refusal(layer: Any) -> str | None:
    if not isinstance(layer, CacheLayer):
        return "the model has layers without keys and values"
    if layer.rule.chunked is not None:
        return "the model has layers of chunked attention"
    if layer.is_watched:
        return "the cache is being watched, or keeps whole windows"
    if layer.rule.span is not None:
        return None
    method = layer.method
    if method.pairs is not None:
        return f"{method} shares rows between layers"
    acting = layer.acts and method.schedule.every is not None
    if acting and method.placement is not None:
        return f"{method} drops rows in decode that lie on the host"
    if method.codec is not None:
        reason = codec_refusal(method.codec)
        if reason is None and (method.read is not None or acting):
            reason = "stores codes, and drops or leaves out some of them in decode"
        if reason is not None:
            return f"{method} {reason}"
    if method.read is not None and layer.layer_idx >= method.read.skip_layers:
        reason = reading_refusal(method.read)
        if reason is None and acting:
            reason = "reads pages of rows that change places"
        if reason is None and method.granularity != "kv_head":
            reason = "reads pages of its own for every query head"
        if reason is not None:
            return f"{method} {reason}"
    return _acting_refusal(method) if acting else None


def _acting_refusal(method: Method) -> str | None:
    """Why dropping rows in decode cannot be done by overwriting one row per step."""
    if method.schedule.every != 1:
        return f"{method} drops rows in decode in strides of {method.schedule.every} tokens"
    if method.schedule.cap is not None or method.schedule.prefill == "never":
        return f"{method} keeps fewer rows in decode than the prompt leaves"
    if method.slot_positions:
        return f"{method} moves its sinks at every step"
    if method.unread_distance is not None:
        return f"{method} leaves stored rows unread"
    plain = (
        isinstance(method.heads, UniformHeads)
        and isinstance(method.choose, TopRows)
        and method.granularity == "kv_head"
        and method.unit is None
        and method.block is None
        and method.refine is None
        and method.dispose is None
    )
    if not plain or not (isinstance(method.score, Recency) or replaces(method)):
        return f"{method} chooses rows in decode in a way that has no form of fixed shape"
    return None


def late_refusal(cache: KVCache) -> str | None:
    """Why the plain loop goes on after all, as only the rows of the prompt can tell."""
    for layer in cache.attention_layers:
        if isinstance(layer.rows, StreamedRows | StreamedCodes) and layer.rule.sliding is not None:
            return f"{layer.method} streams the rows of a sliding window from the host"
        if isinstance(layer.rows, CodedRows):
            apart = isinstance(layer.rows, StreamedCodes) and layer.rows.is_apart
            reason = "has groups of tokens that have lost some" if apart else coded_refusal(layer.rows)
            if reason is not None:
                return f"{layer.method} {reason}"
        reads = layer.reads_pages
        if reads is not None and layer.rows is not None and isinstance(reads[0], PageReader):
            reason = budget_refusal(reads[0], reads[1], layer.rows.lengths)
            if reason is not None:
                return f"{layer.method} {reason}"
    return None


def plan_of(layer: CacheLayer, rows: Layout, new: int, room: int = 1) -> Plan:
    """The slots of one layer for its rows and `new` more of every sequence, in multiples of `room` per head."""
    lengths = rows.lengths
    even = isinstance(rows, DenseRows)
    grown = -(-(lengths + new) // room) * room
    none = torch.zeros_like(lengths)
    if layer.rule.sliding is not None:
        # what fills the window's last place is the oldest row: it is out of sight when the next one comes
        return _plan(grown.clamp(max=layer.rule.sliding), none, False, even)
    if not layer.acts or layer.method.schedule.every is None:
        return _plan(grown, none, False, even)
    budget = layer.decode_budget[:, None].expand_as(lengths)
    assert bool((lengths <= budget).all()), "the prompt left more rows than the method keeps"
    # one row more than stays, for a step reads its own row before the method drops one; one more than there can be,
    # so that a head is full only when it drops
    capacities = torch.minimum(budget, grown) + 1
    return _plan(capacities, sinks_of(layer.method, budget), True, even or replaces(layer.method))


def _plan(capacities: Tensor, wraps: Tensor, spends: bool, even: bool) -> Plan:
    return Plan(capacities.int(), wraps.int(), spends, even, int(capacities.max()))
