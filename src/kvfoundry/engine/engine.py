"""The engine of one model: moves the rows of a cache into static buffers and gives the program that decodes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfoundry.cache import KVCache
from kvfoundry.engine.attention import Extra, kernels_for
from kvfoundry.engine.coded import Coded, tail_like, tail_plan
from kvfoundry.engine.compiled import compiled
from kvfoundry.engine.hosted import Hosted
from kvfoundry.engine.layer import StaticCache, StaticLayer
from kvfoundry.engine.paging import Paging
from kvfoundry.engine.program import Program
from kvfoundry.engine.replacing import Replacing, replaces
from kvfoundry.engine.rows import Plan, StaticRows
from kvfoundry.engine.sampling import Sampler
from kvfoundry.engine.serving import late_refusal, plan_of, refusal
from kvfoundry.errors import KVFoundryError
from kvfoundry.layer import CacheLayer
from kvfoundry.layer_state import storage_bytes
from kvfoundry.layouts import Layout
from kvfoundry.layouts.base import Stretches
from kvfoundry.layouts.coded import CodedRows
from kvfoundry.layouts.streamed import StreamedRows
from kvfoundry.layouts.streamed_codes import StreamedCodes
from kvfoundry.reading.reader import PageReader


class DecodeEngine:
    """Decodes caches of one model in steps of fixed shape, on a CUDA device as replays of one graph.

        engine = kvfoundry.DecodeEngine(model)
        kvfoundry.generate(model, tokenizer, prompts, method, engine=engine)

    One engine for many calls keeps the buffers and the graph of the last one: a call of the same shape class (batch,
    heads, method's way of dropping rows, sampling settings, and no more slots than are there) records nothing again.
    `clear()` frees them. compile: put the model's forward pass through torch.compile first; that takes a minute or two
    once per process for a large model. graph: False runs the same step without recording it. room: slots are given in
    multiples of so many per head, so that texts of similar length are of one class.
    """

    def __init__(self, model: PreTrainedModel, *, compile: bool = False, graph: bool = True, room: int = 256):
        self._model = weakref.ref(model)
        self.compile, self.graph, self.room = compile, graph, room
        self.recorded = 0  # programs made so far
        self._program: Program | None = None
        self._key: Any = None

    @property
    def model(self) -> PreTrainedModel:
        """The model that the engine was made for."""
        model = self._model()
        if model is None:
            raise KVFoundryError("the model of this engine is gone; make an engine for the present one.")
        return model

    @property
    def is_recorded(self) -> bool:
        """Whether the steps of the last call are replays of a CUDA graph."""
        return self._program is not None and self._program.is_recorded

    @property
    def nbytes(self) -> int:
        """Bytes of the static buffers that the engine holds now."""
        if self._program is None:
            return 0
        cache = self._program.cache
        own = (tensor for layer in cache.static for tensor in layer.tensors())
        return storage_bytes(chain(own, () if cache.ring is None else cache.ring.tensors()))

    def clear(self) -> None:
        """Free buffers and graph."""
        if self._program is not None:
            ring = self._program.cache.ring
            # the host may be ahead of replays that still write, and of kernels that read what lies on the host
            if self.is_recorded or (ring is not None and ring.device.type == "cuda"):
                torch.cuda.synchronize()
            if ring is not None:
                ring.forget()  # its events belong to the graph
        self._program = self._key = None

    def begin(
        self,
        cache: KVCache,
        text: Tensor,
        new: int,
        *,
        processors: Sequence[Any] = (),
        sample: bool = False,
        stops: Tensor | None = None,
        pad: int = 0,
    ) -> Program:
        """The program that goes on with a cache, whose rows leave it for the engine's buffers until `finish`.

        text: [batch, tokens] all token ids so far; the cache has seen all but the last. new: steps at most.
        """
        reason = refusal(self.model, cache) or late_refusal(cache)
        if reason is not None:
            raise KVFoundryError(f"the engine cannot decode this cache: {reason}.")
        layers: list[CacheLayer] = cache.attention_layers
        sampler = Sampler(processors, text, _vocabulary(self.model), sample=sample, stops=stops, pad=pad)
        key = (text.shape[0], str(text.device), sampler.settings, [_told(layer) for layer in layers])
        program = self._program if key == self._key else None
        if program is None or not self._take(program, layers, new):
            self.clear()
            program = self._made(layers, sampler, text, new)
            self._program, self._key = program, key
            self.recorded += 1
        else:
            program.sampler.restart(sampler)
        real = layers[0].real
        assert real is not None
        program.ids.copy_(text[:, -1:])
        program.position.copy_(real)
        return program

    def finish(self, cache: KVCache, steps: int, *, keep: bool) -> None:
        """Let the cache go on as one that has decoded `steps` tokens. keep: it needs its rows again."""
        assert self._program is not None
        for layer, static in zip(cache.attention_layers, self._program.cache.static, strict=True):
            assert layer.real is not None
            columns = {} if static.extra.replacing is None else static.extra.replacing.columns()
            rows = static.rows.layout(layer.real + steps, columns) if keep else None
            if rows is not None and static.extra.hosted is not None:
                rows = static.extra.hosted.with_newest(rows)
            full = static.began + steps > layer.decode_budget[:, None] if static.rows.spends else None
            layer.resume(rows, steps, dropped=full is not None and bool(full.any()))
        if self._program.cache.ring is not None:  # nobody can use the program again
            self.clear()

    def _made(self, layers: Sequence[CacheLayer], sampler: Sampler, text: Tensor, new: int) -> Program:
        position = torch.zeros(text.shape[0], dtype=torch.long, device=text.device)
        kernels, static = kernels_for(text.device), []
        for number, layer in enumerate(layers):
            plan, like = self._plan(layer, new)
            rows = StaticRows.empty(plan, like)
            extra = self._extra(layer, plan, rows, new)
            if extra.hosted is not None:
                extra.hosted.ring.follow()
            static.append(StaticLayer(number, rows, extra, kernels, position, layer.family))
            del like
            _move(layer, static[-1], plan)
        forward: Callable[..., Any] = compiled(self.model) if self.compile else self.model.forward
        graph = self.graph and text.device.type == "cuda"
        # laid out alike for texts of any length, or a compiled model is compiled anew
        ids = text[:, -1:].clone(memory_format=torch.contiguous_format)
        return Program(forward, StaticCache(static), sampler, ids, position, graph=graph)

    def _extra(self, layer: CacheLayer, plan: Plan, rows: StaticRows, new: int) -> Extra:
        paged, hosted = layer.reads_pages is not None, None
        if isinstance(layer.rows, StreamedRows) or (isinstance(layer.rows, StreamedCodes) and layer.rows.is_hosted):
            hosted = Hosted(layer.rows, streams=not paged)
        moving = _moving(layer.rows)
        if isinstance(moving, CodedRows):
            return Extra(coded=Coded(moving, rows, new, self.room), hosted=hosted)
        if plan.spends and replaces(layer.method):
            return Extra(replacing=Replacing(layer.method, rows))
        if layer.reads_pages is not None:
            reader, budget = layer.reads_pages
            assert isinstance(reader, PageReader)
            return Extra(paging=Paging(reader, int(budget[0]), rows, hosted), hosted=hosted)
        return Extra(hosted=hosted)

    def _take(self, program: Program, layers: Sequence[CacheLayer], new: int) -> bool:
        """Move the rows into the buffers of a program that exists, if they fit."""
        if program.cache.ring is not None:  # its graph reads the host memory of other rows
            return False
        plans = []
        for layer, static in zip(layers, program.cache.static, strict=True):
            plan, like = self._plan(layer, new)
            coded, held = static.extra.coded, layer.rows
            if (coded is not None) != isinstance(held, CodedRows) or not static.rows.fits(plan, like):
                return False
            if coded is not None and isinstance(held, CodedRows) and not coded.fits(held, new):
                return False
            plans.append(plan)
        for layer, static, plan in zip(layers, program.cache.static, plans, strict=True):
            _move(layer, static, plan)
        return True

    def _plan(self, layer: CacheLayer, new: int) -> tuple[Plan, Stretches]:
        rows = _moving(layer.rows)
        if isinstance(rows, CodedRows):
            return tail_plan(rows), tail_like(rows)
        return plan_of(layer, rows, new, self.room), rows.stretches()


def _told(layer: CacheLayer) -> tuple[Any, ...]:
    """What a recorded step has taken from a layer's method."""
    reads = layer.reads_pages
    return str(layer.method), layer.acts, None if reads is None else int(reads[1][0])


def _moving(rows: Layout | None) -> Layout:
    """What of a layer's rows goes into static buffers: all but those on the host."""
    assert rows is not None
    return rows.newest if isinstance(rows, StreamedRows | StreamedCodes) else rows


def _move(layer: CacheLayer, static: StaticLayer, plan: Plan) -> None:
    """Take the rows out of a layer of the cache; what it held is free when this returns."""
    budget = layer.decode_budget if plan.spends else None
    rows = _moving(layer.lend())
    if static.extra.coded is not None and isinstance(rows, CodedRows):
        static.extra.coded.fill(rows)
    else:
        static.rows.fill(plan, rows)
    static.began = torch.minimum(rows.lengths, plan.capacities)
    if static.extra.replacing is not None and budget is not None:
        static.extra.replacing.begin(budget, rows.view().columns)
    if static.extra.paging is not None:
        static.extra.paging.begin()


def _vocabulary(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()
    width = getattr(head, "out_features", None)
    return int(width or model.config.get_text_config(decoder=True).vocab_size)
