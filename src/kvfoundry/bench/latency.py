"""One run of one arm: a prompt and the tokens behind it, every token timed, by the same `generate` for all arms."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteriaList

from kvfoundry import compat
from kvfoundry.bench.memory import Peak, allocated, read_bytes
from kvfoundry.bench.own_attention import own_attention
from kvfoundry.bench.random_rows import of_method, of_transformers, refusal
from kvfoundry.bench.roofline import row_bytes
from kvfoundry.bench.timing import Clock, now
from kvfoundry.cache import KVCache
from kvfoundry.devices import input_device
from kvfoundry.engine import DecodeEngine
from kvfoundry.engine.choosing import Choice
from kvfoundry.engine.decoding import AHEAD
from kvfoundry.errors import KVFoundryError
from kvfoundry.feeding import feed
from kvfoundry.generation import Reconstruct
from kvfoundry.method import Method
from kvfoundry.planning.geometry import LayerGeometry

# What can be timed, and what it is. The first two are transformers' own; nothing of ours is in them.
ARMS = {
    "eager": "transformers' generate with its DynamicCache",
    "static": "transformers' generate with its StaticCache, which it compiles on a GPU",
    "plain": "our cache in transformers' loop",
    "engine": "the engine, on a GPU as replays of a CUDA graph",
    "compiled": "the engine over a compiled model",
}
OWN = ("eager", "static")


class NotServed(KVFoundryError):
    """The engine cannot serve this, for the reason that it gives."""


@dataclass
class Run:
    """Seconds and bytes of one run. ttft: to the first token, None where no prompt was read; steps: between later ones.

    stored: bytes of the cache when the prompt is done; read: those of the rows that a step cannot do without; peak:
    above the weights over the whole run, on a device that counts it, else the largest cache. static: the engine's
    buffers. host: bytes in host memory, rows that were dropped too; linked: of `read`, what comes from there.
    """

    ttft: float | None
    steps: list[float]
    peak: int
    stored: int
    read: int
    kept_share: float = 1.0
    static: int = 0
    host: int = 0
    linked: int = 0
    notes: list[str] = field(default_factory=list)


class Runner:
    """Runs arms on one model.

    layers: `planning.geometry` of the model. tokenizer: only for methods that repeat their context. prefill_chunk: our
    arms read the prompt in pieces of so many tokens. random_rows: contexts are random rows where those can stand for
    what a prompt leaves, and no prompt is read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        layers: dict[int, LayerGeometry],
        prefill_chunk: int | None = None,
        random_rows: bool = False,
    ):
        self.model, self.tokenizer, self.layers = model, tokenizer, layers
        self.prefill_chunk, self.random_rows = prefill_chunk, random_rows
        self._engines: dict[str, DecodeEngine] = {}
        self._base = 0
        self.clear()

    def clear(self) -> None:
        """Free the buffers and graphs of the engines; what is allocated then is not part of any later peak."""
        for engine in self._engines.values():
            engine.clear()
        self._engines.clear()
        device = input_device(self.model)
        if device.type == "cuda":
            gc.collect()  # what stands in cycles is not free before
            torch.cuda.empty_cache()
        self._base = allocated(device)

    @torch.inference_mode()
    def run(self, arm: str, method: Method, ids: Tensor, new_tokens: int, skip: int) -> Run:
        """Read ids [batch, tokens] and decode `new_tokens`; the first `skip` steps are not counted.

        The last ones are not either: an engine has computed them when their predecessors arrive.

        Raises NotServed where the engine steps aside.
        """
        with _endless(self.model):
            return (
                self._own(arm, ids, new_tokens, skip) if arm in OWN else self._ours(arm, method, ids, new_tokens, skip)
            )

    def fills(self, arm: str, method: Method | None) -> bool:
        """Whether a context of this arm is random rows. A static cache always reads its prompt."""
        return self.random_rows and arm != "static" and (method is None or refusal(method) is None)

    def _own(self, arm: str, ids: Tensor, new_tokens: int, skip: int) -> Run:
        """Bytes of these caches are those of whole rows; a static one has all its slots from the start."""
        batch, tokens = ids.shape
        options: dict[str, Any] = {} if arm == "eager" else {"cache_implementation": "static"}
        full = row_bytes(self.layers, tokens + new_tokens, self.model.dtype.itemsize) * batch
        read = row_bytes(self.layers, tokens, self.model.dtype.itemsize) * batch
        fills = self.fills(arm, None)
        with own_attention(self.model):
            peak, clock = Peak(ids.device, self._base), Clock(ids.device)
            if fills:
                held = of_transformers(self.model, self.layers, batch, tokens)
                ids, options = _one_more(ids), {compat.CACHE_ARGUMENT: held}
            began = now(ids.device)
            self._generate(ids, new_tokens, [clock], **options)
        stored, notes = read if arm == "eager" else full, list[str]()
        if arm == "static" and not hasattr(self.model, "_compiled_call"):
            notes.append(f"transformers compiled nothing on {ids.device.type}")
        ttft = None if fills else clock.times[0] - began
        return Run(ttft, clock.steps(skip, last=AHEAD - 1), peak.nbytes or full, stored, read, notes=notes)

    def _ours(self, arm: str, method: Method, ids: Tensor, new_tokens: int, skip: int) -> Run:
        mask, tokens = torch.ones_like(ids), ids.shape[1]
        engine = self._engine(arm)
        peak, began, fills = Peak(ids.device, self._base), now(ids.device), self.fills(arm, method)
        if fills:
            cache = of_method(self.model, method, self.layers, ids.shape[0], tokens)
            ids = _one_more(ids)
        else:
            cache = KVCache(self.model, method)
        decoding, notes = self._decoding(engine, cache, ids.device)
        if self.prefill_chunk is not None and not fills:
            cache.expect_prompt(tokens)
            feed(
                self.model,
                ids,
                mask,
                cache,
                self.prefill_chunk,
                (tokens - 1) // self.prefill_chunk * self.prefill_chunk,
            )
        found: dict[str, Any] = {}

        def look() -> None:
            read = read_bytes(cache, self.layers, self.model.dtype.itemsize)
            linked = 0 if method.placement is None else read
            found.update(stored=cache.nbytes, host=cache.host_nbytes, kept_share=cache.kept_share, read=read)
            found.update(linked=linked, notes=cache.notes)

        if fills:
            look()
        clock, criteria = Clock(ids.device, None if fills else look), []
        if method.reconstructs is not None and not fills:
            criteria.append(Reconstruct(self.model, self.tokenizer, cache, ids, mask))
        options = {compat.CACHE_ARGUMENT: cache, **({} if decoding is None else {"custom_generate": decoding})}
        self._generate(ids, new_tokens, [*criteria, clock], **options)
        if engine is not None and not engine.nbytes:
            raise NotServed(" ".join(notes) or "the engine did not decode this.")
        static = 0 if engine is None else engine.nbytes
        return Run(
            None if fills else clock.times[0] - began,
            clock.steps(skip, last=AHEAD - 1),
            peak.nbytes or max(cache.peak_nbytes, static),
            found["stored"],
            found["read"],
            found["kept_share"],
            static,
            found["host"],
            found["linked"],
            [*found["notes"], *notes],
        )

    def _engine(self, arm: str) -> DecodeEngine | None:
        if arm == "plain":
            return None
        return self._engines.setdefault(arm, DecodeEngine(self.model, compile=arm == "compiled"))

    def _decoding(
        self, engine: DecodeEngine | None, cache: KVCache, device: torch.device
    ) -> tuple[Callable[..., Tensor] | None, list[str]]:
        choice = Choice(self.model, engine or False, require_kernels=False, compile=False)
        found = choice.decoding(device, cache, None, None, {}, outlives=False)
        if engine is not None and found.method is None:
            raise NotServed(" ".join(found.notes))
        return found.method, found.notes

    def _generate(self, ids: Tensor, new_tokens: int, criteria: list[Any], **options: Any) -> None:
        self.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens,
            stopping_criteria=StoppingCriteriaList(criteria), **options,
        )  # fmt: skip


def _one_more(ids: Tensor) -> Tensor:
    """The ids of a text that a cache has seen, and one that it has not."""
    return torch.cat([ids, ids[:, :1]], dim=1)


@contextmanager
def _endless(model: PreTrainedModel) -> Iterator[None]:
    """Greedy answers that no token ends; the model's own settings come back on exit."""
    own, model.generation_config = model.generation_config, GenerationConfig(pad_token_id=0)
    try:
        yield
    finally:
        model.generation_config = own
