"""Will it fit: bytes of every method on one model and one device, and how many tokens, chunks and sequences fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

import kvfoundry
from kvfoundry.attention import family_of
from kvfoundry.errors import DataError, SpecError, UnsupportedModelError
from kvfoundry.feeding import position_limit
from kvfoundry.method import Method
from kvfoundry.models import architecture
from kvfoundry.planning.geometry import LayerGeometry, geometry
from kvfoundry.planning.memory import Memory, memory_at_hand
from kvfoundry.planning.meter import Meter
from kvfoundry.registry import REQUIRED
from kvfoundry.selection.budgets import UniformHeads

# Contexts are searched on this grid.
_GRID = 64
# Where a model names no limit, contexts are searched up to here.
_LONGEST = 2**24

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class MethodPlan:
    """One method on the planned model and device; bytes, tokens and counts.

    token_bytes: of the cache per token of the context, after eviction and coding. chunk_bytes: of a passage of
    `chunk_tokens` that is read alone. cache_bytes: of `batch` sequences of `context` tokens after their prompts;
    share: that over the full cache's. parked_bytes: of rows on the host. peak_bytes: weights and cache while the
    prompts are read in one piece. fits: whether that and the headroom are within the device. largest_context:
    tokens of each of `batch` sequences, at most the model's positions; sequences of `context` tokens, tokens in all
    of them, and resident chunks: how many fit beside the weights. remarks: what the figures do not say.
    """

    method: str
    token_bytes: float
    chunk_bytes: int
    cache_bytes: int
    share: float
    parked_bytes: int
    peak_bytes: int
    fits: bool
    largest_context: int
    sequences: int
    tokens: int
    chunks: int
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What was asked, what the model is, and a line per method.

    layers: number of layers of each geometry, in words. left_out: method -> why it is not for this model.
    """

    model: str
    family: str
    dtype: str
    parameters: int
    weight_bytes: int
    layers: dict[str, int]
    device: str
    device_bytes: int
    headroom_bytes: int
    room_bytes: int
    positions: int | None
    context: int
    batch: int
    chunk_tokens: int
    methods: tuple[MethodPlan, ...]
    left_out: dict[str, str]
    remarks: tuple[str, ...] = ()


def every_method(budget: int | float) -> list[str]:
    """The spec of every registered method that needs nothing but perhaps a budget."""
    specs = []
    for name, info in kvfoundry.methods().items():
        required = [key for key, value in info.parameters.items() if value is REQUIRED]
        if info.kind == "method" and set(required) <= {"budget"}:
            takes = "budget" in info.parameters
            specs.append(f"{name}(budget={budget!r})" if takes else name)
    return sorted(specs, key=lambda spec: spec != "fullkv")


def plan(
    model: str | Path = "smollm2",
    *,
    device: Memory | None = None,
    dtype: str = "auto",
    methods: Sequence[str | Method] = (),
    budget: int | float = 0.25,
    context: int | None = None,
    batch: int = 1,
    chunk_tokens: int = 512,
    headroom: float = 0.1,
    weight_bytes: int | None = None,
    on_method: Callable[[str], None] | None = None,
) -> Plan:
    """Plan a model on a device; no weights are read.

    model: as in `kvfoundry.load`, or a config.json or a folder with one. device: by default the first GPU, or the
    machine's memory. dtype: "auto" is what `load` would take there. methods: specs; without any, every method that
    exists, those that take a budget under `budget`. context: tokens of a sequence, by default 4096 or what the model
    has positions for. headroom: share of the device for activations, workspace and the spare slots of decode.
    weight_bytes: of the weights, where they are not `parameters` numbers of the dtype (quantized checkpoints).
    on_method: told of each method before it is measured.
    Raises KVFoundryError for values that cannot be, models that are not served, and methods that are not for this one.
    """
    device = device or memory_at_hand()
    outline = architecture(model)
    shapes = geometry(outline)
    numbers, remarks = _dtype(outline, dtype, device)
    limit = position_limit(outline)
    context = _checked(context, batch, chunk_tokens, headroom, limit)
    parameters = sum(parameter.numel() for parameter in outline.parameters())
    weights = parameters * numbers.itemsize if weight_bytes is None else weight_bytes
    kept_free = int(device.nbytes * headroom)
    room = device.nbytes - kept_free - weights
    quantized = getattr(outline.config, "quantization_config", None)
    if quantized is not None and weight_bytes is None:
        remarks.append("the checkpoint is quantized, and its weights are counted in the dtype: give their size")
    if room <= 0:
        remarks.append("the weights and the headroom alone are larger than the device")
    states = len(outline.config.get_text_config(decoder=True).layer_types) - len(shapes) if _named(outline) else 0
    if states > 0:
        remarks.append(f"{states} layers hold a recurrent state or nothing, which is not counted")
    asked = [Method.parse(spec) for spec in methods] or [Method.parse(spec) for spec in every_method(budget)]
    full = Meter(outline, "fullkv", numbers).size(context).stored
    found: list[MethodPlan] = []
    left_out: dict[str, str] = {}
    for method in asked:
        if on_method is not None:
            on_method(str(method))
        try:
            meter = Meter(outline, method, numbers)
            found.append(_one(meter, method, full, weights, room, context, batch, chunk_tokens, limit))
        except (SpecError, UnsupportedModelError) as error:
            if methods:
                raise
            left_out[str(method)] = str(error)
    return Plan(
        model=str(model),
        family=family_of(outline),
        dtype=str(numbers).removeprefix("torch."),
        parameters=parameters,
        weight_bytes=weights,
        layers=_in_words(shapes.values()),
        device=device.name,
        device_bytes=device.nbytes,
        headroom_bytes=kept_free,
        room_bytes=max(0, room),
        positions=limit,
        context=context,
        batch=batch,
        chunk_tokens=chunk_tokens,
        methods=tuple(found),
        left_out=left_out,
        remarks=tuple(remarks),
    )


def _named(model: PreTrainedModel) -> bool:
    return bool(getattr(model.config.get_text_config(decoder=True), "layer_types", None))


def _checked(context: int | None, batch: int, chunk_tokens: int, headroom: float, limit: int | None) -> int:
    """The context in force; DataError for values that cannot be."""
    for name, value in (("context", context), ("batch", batch), ("chunk tokens", chunk_tokens)):
        if value is not None and value < 1:
            raise DataError(f"{name} must be at least 1, got {value}.")
    if not 0 <= headroom < 1:
        raise DataError(f"the headroom is a share of the device from 0 to below 1, got {headroom}.")
    context = context if context is not None else min(4096, limit or 4096)
    for name, value in (("context", context), ("chunk tokens", chunk_tokens)):
        if limit is not None and value > limit:
            raise DataError(f"{name} ({value}) is more than the {limit} positions of the model; give fewer.")
    return context


def _dtype(model: PreTrainedModel, dtype: str, device: Memory) -> tuple[torch.dtype, list[str]]:
    """What `load` would take on that device, with a remark where that is a guess."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise DataError(f"dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}.")
        return DTYPES[dtype], []
    if not device.on_gpu:
        return torch.float32, []
    named = getattr(model.config.get_text_config(decoder=True), "dtype", None) or getattr(model.config, "dtype", None)
    if isinstance(named, str):
        named = getattr(torch, named, None)
    if isinstance(named, torch.dtype) and named in DTYPES.values():
        return named, []
    return torch.bfloat16, ["the config names no dtype, so bfloat16 is assumed"]


def _in_words(shapes: Iterable[LayerGeometry]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for shape in shapes:
        kind = "full attention"
        if shape.rule.span is not None:
            kind = f"{'window' if shape.rule.sliding else 'chunks'} of {shape.rule.span}"
        width = f"{shape.key_dim}" if shape.key_dim == shape.value_dim else f"{shape.key_dim}/{shape.value_dim}"
        words = f"{kind}, {shape.kv_heads} KV heads of {width} for {shape.query_heads} query heads"
        counts[words] = counts.get(words, 0) + 1
    return counts


def _one(
    meter: Meter,
    method: Method,
    full: int,
    weights: int,
    room: int,
    context: int,
    batch: int,
    chunk_tokens: int,
    limit: int | None,
) -> MethodPlan:
    size, chunk = meter.size(context), meter.chunk_bytes(chunk_tokens)
    growing = size.peak - size.stored  # while the last of them is read
    # what lives on the host takes the device only while it is read
    sequences = max(0, (room - growing) // size.stored if size.stored else room // size.peak)
    return MethodPlan(
        method=str(method),
        token_bytes=size.stored / context,
        chunk_bytes=chunk,
        cache_bytes=size.stored * batch,
        share=size.stored / full,
        parked_bytes=size.parked * batch,
        peak_bytes=weights + size.peak * batch,
        fits=size.peak * batch <= room,
        largest_context=_largest(lambda tokens: meter.size(tokens).peak * batch, room, limit or _LONGEST),
        sequences=sequences,
        tokens=sequences * context,
        chunks=max(0, room // chunk),
        remarks=tuple(_remarks(method)),
    )


def _remarks(method: Method) -> list[str]:
    remarks = []
    if method.codec is not None and not isinstance(method.heads, UniformHeads):
        remarks.append("its heads keep unequal numbers of rows, so what the codec holds depends on the text")
    if method.placement is not None:
        remarks.append("its rows are in host memory, and whether they fit there is not looked at")
    if method.read is not None:
        remarks.append("decode adds the bounds of its pages")
    return remarks


def _largest(peak: Callable[[int], int], room: int, limit: int) -> int:
    """The most tokens, on a grid, whose peak is within the room; bytes grow with tokens and nearly in a line."""
    if room <= 0 or peak(1) > room:
        return 0
    if peak(limit) <= room:
        return limit
    low, high, straight = 1, limit, True
    ends = {low: peak(low), high: peak(high)}
    while high - low > _GRID:
        # In turn where the line between both ends crosses the room, and one step of the grid further, so that a
        # straight line is settled by two looks; every third look halves what is left, whatever the shape.
        along = low + (room - ends[low]) / max(ends[high] - ends[low], 1) * (high - low)
        guess = int(along) // _GRID * _GRID if straight else int(along) // _GRID * _GRID + _GRID
        if len(ends) % 3 == 1:
            guess = (low + high) // 2 // _GRID * _GRID
        guess = min(max(guess, low + 1), high - 1)
        ends[guess] = peak(guess)
        low, high = (guess, high) if ends[guess] <= room else (low, guess)
        straight = not straight
    return low
