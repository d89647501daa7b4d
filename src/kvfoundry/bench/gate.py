"""What has to be right before a method is timed: its prompt, its steps in the engine, and the replays of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvfoundry import compat
from kvfoundry.bench.own_attention import own_attention
from kvfoundry.bench.random_weights import built, shallow
from kvfoundry.bench.record import Record
from kvfoundry.cache import KVCache
from kvfoundry.engine import DecodeEngine
from kvfoundry.engine.program import Program
from kvfoundry.engine.serving import late_refusal, refusal
from kvfoundry.method import Method
from kvfoundry.reconstruction import compress_by_reconstruction

# Logits of the same rows in float32, relative to the norm of the plain path's: products of a GPU may round to 10 bits.
TOLERANCE = {"cpu": 1e-4, "cuda": 3e-3}
# In two bytes rounding hides small faults; large ones it does not.
_COARSE = 5e-2
_LAYERS = 4
# Sequences, and tokens of each at most, by kind of device.
_BATCH, _TOKENS = 2, {"cpu": 320, "cuda": 2000}


def allowed(model: PreTrainedModel) -> float:
    """The relative error that rounding may make of this model's logits."""
    return TOLERANCE.get(model.device.type, TOLERANCE["cuda"]) if model.dtype == torch.float32 else _COARSE


def in_float32(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same shape in float32, where rounding does not hide a fault: itself, or one of a few layers."""
    if model.dtype == torch.float32:
        return model
    return built(shallow(model.config, _LAYERS), torch.float32, model.device)


def distance(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference relative to that of what was expected."""
    found, expected = found.float(), expected.float()
    return float((found - expected).norm() / expected.norm())


def engine_error(model: PreTrainedModel, plain: KVCache, twin: KVCache, ids: Tensor, steps: int = 4) -> float:
    """The engine says what the plain path says: the largest error of logits over some greedy steps.

    plain, twin: two caches with the same rows, which have seen all of ids [batch, tokens] but the last.
    """
    tokens = ids.shape[1] - 1
    engine = DecodeEngine(model, graph=False)
    program = engine.begin(twin, ids, steps + 4)
    token, error = ids[:, -1:], 0.0
    for step in range(steps):
        positions = torch.full_like(token, tokens + step)
        arguments = {compat.CACHE_ARGUMENT: plain}
        said = model(input_ids=token, position_ids=positions, use_cache=True, **arguments).logits[:, -1].float()
        error = _worse(error, distance(program.logits(), said))
        token = said.argmax(dim=-1, keepdim=True)
        program.ids.copy_(token)
        program.position += 1
    engine.clear()
    return error


def replay_error(model: PreTrainedModel, cache: KVCache, ids: Tensor, fed: Tensor) -> tuple[float, str | None]:
    """A replayed step says what the same step says without a graph, whatever token it is given.

    cache: as in `engine_error`; it is used up. fed: [batch, steps] tokens. Returns the largest error, and why there was
    no graph if there was none.
    """
    said: list[list[Tensor]] = []
    note: str | None = None
    for graph, own in ((False, cache.fork()), (True, cache)):
        engine = DecodeEngine(model, graph=graph)
        program: Program = engine.begin(own, ids, fed.shape[1] + 2)
        said.append([])
        for number in range(fed.shape[1]):
            program.ids.copy_(fed[:, number : number + 1])
            program.advance()
            assert program.said is not None
            said[-1].append(program.said.float().clone())  # a replay writes where the last one did
        if graph and not program.is_recorded:
            note = program.note or "no graph was recorded"
        engine.clear()
    error = 0.0
    for plain, replayed in zip(*said, strict=True):
        error = _worse(error, distance(replayed, plain))
    return error, note


def _worse(error: float, other: float) -> float:
    return other if not other <= error else error  # a NaN is the worst


@torch.inference_mode()
def check(record: Record, model: PreTrainedModel, method: Method, tokenizer: Any, tokens: int, *, engine: bool) -> bool:
    """Whether a method is right on this model, on random ids; every comparison is a gate of the record.

    The prompt's last logits are those of the model's own attention, which every method that reads the whole prompt
    leaves as they are; steps of the engine are those of the plain path, and replays of its graph those without one.
    tokenizer: for methods that repeat the context. tokens: of the longest text that will be timed. engine: whether it
    will decode.
    """
    device, limit = model.device, allowed(model)
    tokens = min(tokens, _TOKENS.get(device.type, _TOKENS["cuda"]))
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (_BATCH, tokens + 1), device=device)
    prompt, mask = ids[:, :-1], torch.ones_like(ids[:, :-1])
    own = _own_logits(model, prompt, mask)
    cache = KVCache(model, method)
    cache.expect_prompt(tokens)
    arguments = {compat.CACHE_ARGUMENT: cache}
    said = model(prompt, attention_mask=mask, use_cache=True, logits_to_keep=1, **arguments).logits[:, -1]
    right = True
    if method.prefill is None:  # a sparse prompt is an approximation by design
        right = record.gate(f"{method}: logits of the prompt", distance(said, own), limit)
    if method.reconstructs is not None:
        compress_by_reconstruction(model, tokenizer, cache, prompt, mask)
    if not right or not engine or (refusal(model, cache) or late_refusal(cache)) is not None:
        return right
    again = cache.fork() if device.type == "cuda" else None
    error = engine_error(model, cache, cache.fork(), ids)
    right = record.gate(f"{method}: logits of 4 steps of the engine", error, limit)
    if again is not None:
        fed = torch.randint_like(ids[:, :10], min(3, vocabulary - 1), vocabulary)
        error, note = replay_error(model, again, ids, fed)
        if note is not None:
            record.note(f"{method}: {note}")
        right = record.gate(f"{method}: logits of replays", error, limit) and right
    return right


def _own_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Of the last token, by transformers' own eager attention and cache."""
    with own_attention(model, "eager"):
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        arguments = {compat.CACHE_ARGUMENT: cache}
        logits: Tensor = model(ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **arguments).logits[:, -1]
    return logits
