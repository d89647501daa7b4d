"""The answers of many methods to the same prompts, for a fraction of what one after the other would cost."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from kvfoundry import compat
from kvfoundry.cache import KVCache
from kvfoundry.devices import input_device
from kvfoundry.engine import DecodeEngine
from kvfoundry.engine.choosing import Choice
from kvfoundry.errors import DataError, UnsupportedModelError
from kvfoundry.feeding import check_length
from kvfoundry.generation import Generation, Held, encode, generations, stop_tokens, until_stop
from kvfoundry.method import Method
from kvfoundry.reconstruction import compress_by_reconstruction
from kvfoundry.together.decode import decode
from kvfoundry.together.join import joined, kinship
from kvfoundry.together.prompt import SharedPrompt

# Rows that decode in one batch. More of them cost a CPU as much as they save, while a GPU is idle with fewer.
_ROWS = {"cpu": 64, "cuda": 4096}
# What a generation config may not ask for, because it means something else where an answer is made in several calls.
_NOT_IN_PIECES = (
    "forced_eos_token_id", "forced_bos_token_id", "begin_suppress_tokens", "exponential_decay_length_penalty",
)  # fmt: skip


@dataclass
class _Arm:
    """One method: its cache while it has one, what that held after the prompt, and the answers so far."""

    cache: KVCache | None
    held: Held
    answers: list[list[int]]
    notes: list[str]
    kin: Hashable | None
    longest: int


@torch.inference_mode()
def generate_together(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    methods: Sequence[str | Method],
    max_new_tokens: int | Sequence[int] = 64,
    *,
    chat: bool = False,
    answer_prefix: str | list[str] = "",
    hold_back: int = 0,
    eos_token_id: int | list[int] | None = None,
    min_new_tokens: int | None = None,
    seed: int | None = None,
    rows: int | None = None,
    engine: DecodeEngine | bool | None = None,
) -> list[list[Generation]]:
    """What `kvfoundry.generate(..., do_sample=False, details=True)` returns for each of the methods.

    The prompts are one batch, read once for all methods (see `SharedPrompt`). Then every method that only reads what it
    has kept is decoded in one batch with others of its kind, and one that goes on evicting with itself under other
    budgets; rows of a batch are independent, so texts, kept rows and bytes are those of a run of its own, up to the
    rounding that any other batch size brings. Times of one method are not known: `ttft_seconds` and `ms_per_token` are
    None, and `seconds` is the share of one answer in the whole.

    max_new_tokens: for all prompts, or one for each. rows: of a decoding batch at most, by default 64 on a CPU and
    4,096 on a GPU. engine and the other parameters are those of `kvfoundry.generate`.

    Raises DataError for an empty prompt or one that does not fit the model, UnsupportedModelError for a model that
    cannot share a prompt, or whose generation config asks for beams or for a forced end.
    """
    began = time.perf_counter()
    _check(model)
    texts, parsed = list(prompts), [Method.parse(method) for method in methods]
    limits = [max_new_tokens] * len(texts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    prefixes = [answer_prefix] * len(texts) if isinstance(answer_prefix, str) else list(answer_prefix)
    for name, given in (("max_new_tokens", limits), ("answer prefixes", prefixes)):
        if len(given) != len(texts):
            raise DataError(f"{len(given)} {name} for {len(texts)} prompts; give one, or one for each prompt.")
    if seed is not None:
        set_seed(seed)
    ids, mask = encode(tokenizer, texts, chat=chat, answer_prefixes=prefixes)
    lengths = mask.sum(dim=1).tolist()
    for length, limit in zip(lengths, limits, strict=True):
        check_length(model, length, limit, "a prompt")
    if not 0 <= hold_back < min(lengths):
        raise DataError(f"hold_back={hold_back} leaves nothing of a prompt of {min(lengths)} tokens.")
    ids, mask = (tensor.to(input_device(model)) for tensor in (ids, mask))
    found = eos_token_id if eos_token_id is not None else stop_tokens(model)
    stops = {found} if isinstance(found, int) else set(found or ())
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    configured = model.generation_config.min_new_tokens if model.generation_config is not None else None
    least = min_new_tokens if min_new_tokens is not None else configured or 0

    arms = _read(model, tokenizer, parsed, ids, mask, hold_back, stops, pad, least)
    size = rows or _ROWS.get(ids.device.type, _ROWS["cpu"])
    choice = Choice(model, engine, require_kernels=False, compile=False)
    for group in _groups(arms, max(1, size // len(texts))):
        _go_on(model, [arms[number] for number in group], ids, mask, limits, stops, pad, least, choice)
    choice.end()
    share = (time.perf_counter() - began) / max(1, len(arms) * len(texts))
    return [
        generations(
            model, tokenizer, [until_stop(answer, stops) for answer in arm.answers], lengths, arm.held,
            ttft_seconds=None, ms_per_token=None, seconds=share, notes=arm.notes,
        )
        for arm in arms
    ]  # fmt: skip


def _check(model: PreTrainedModel) -> None:
    config = model.generation_config
    asked = [name for name in _NOT_IN_PIECES if getattr(config, name, None) is not None]
    if (getattr(config, "num_beams", None) or 1) > 1:
        asked.append("num_beams")
    if asked:
        raise UnsupportedModelError(
            f"the generation config of this model sets {asked[0]}, which answers in common batches cannot honour; "
            "use kvfoundry.generate."
        )


def _read(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[Method],
    ids: Tensor,
    mask: Tensor,
    hold_back: int,
    stops: Collection[int],
    pad: int,
    least: int,
) -> list[_Arm]:
    """Read the prompts, and let every method choose the first token of each answer.

    Methods that compute the attention of a prompt in different ways read it one after the other.
    """
    ways: dict[Hashable, list[int]] = {}
    for number, method in enumerate(methods):
        ways.setdefault(method.prefill, []).append(number)
    arms: dict[int, _Arm] = {}
    for numbers in ways.values():
        alike = [methods[number] for number in numbers]
        found = _read_alike(model, tokenizer, alike, ids, mask, hold_back, stops, pad, least)
        arms |= zip(numbers, found, strict=True)
    return [arms[number] for number in range(len(methods))]


def _read_alike(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[Method],
    ids: Tensor,
    mask: Tensor,
    hold_back: int,
    stops: Collection[int],
    pad: int,
    least: int,
) -> list[_Arm]:
    prompt = SharedPrompt(model, methods)
    read = ids.shape[1] - hold_back
    first: list[int] = []
    if hold_back:
        positions = (mask[:, :read].cumsum(dim=1) - 1).clamp(min=0)
        model(
            ids[:, :read], attention_mask=mask[:, :read], position_ids=positions, use_cache=True, logits_to_keep=1,
            **{compat.CACHE_ARGUMENT: prompt},
        )  # fmt: skip
    else:
        first = _first_tokens(model, prompt, ids, mask, stops, pad, least)
    second_pass: dict[Hashable, list[KVCache]] = {}
    for cache in prompt.caches:
        if (plan := cache.method.reconstructs) is not None:
            second_pass.setdefault(plan.reading, []).append(cache)
    for cache, *alike in second_pass.values():
        compress_by_reconstruction(model, tokenizer, cache, ids[:, :read], mask[:, :read], alike=alike)
    arms = []
    for cache in prompt.caches:
        chosen = _first_tokens(model, cache, ids, mask, stops, pad, least) if hold_back else first
        longest = max(int(layer.lengths.max()) for layer in cache.attention_layers)
        answers = [[token] for token in chosen]
        arms.append(_Arm(cache, Held.by(cache), answers, cache.notes, kinship(cache), longest))
    return arms


def _first_tokens(
    model: PreTrainedModel, cache: KVCache, ids: Tensor, mask: Tensor, stops: Collection[int], pad: int, least: int
) -> list[int]:
    output = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=mask,
        **{compat.CACHE_ARGUMENT: cache},
        max_new_tokens=1,
        min_new_tokens=min(1, least) or None,
        do_sample=False,
        eos_token_id=list(stops) or None,
        pad_token_id=pad,
    )
    tokens: list[int] = output[:, -1].tolist()
    return tokens


def _groups(arms: Sequence[_Arm], size: int) -> Iterator[list[int]]:
    """The arms that decode together, at most `size` of them, those with as many rows next to each other.

    A batch is as wide as its longest row, so rows share one only with rows at least half as long.
    """
    kin: dict[Hashable, list[int]] = {}
    for number, arm in enumerate(arms):
        kin.setdefault(("alone", number) if arm.kin is None else arm.kin, []).append(number)
    for alike in kin.values():
        alike.sort(key=lambda number: arms[number].longest)
        group: list[int] = []
        for number in alike:
            if group and (len(group) == size or arms[number].longest > 2 * arms[group[0]].longest):
                yield group
                group = []
            group.append(number)
        yield group


def _go_on(
    model: PreTrainedModel,
    arms: Sequence[_Arm],
    ids: Tensor,
    mask: Tensor,
    limits: Sequence[int],
    stops: Collection[int],
    pad: int,
    least: int,
    choice: Choice,
) -> None:
    """Complete the answers of some arms in one batch, and let go of their caches."""
    caches = [arm.cache for arm in arms if arm.cache is not None]
    cache = caches[0] if len(caches) == 1 else joined(model, caches)
    for arm in arms:
        arm.cache = None
    del caches
    count = len(arms)
    answers = [answer for arm in arms for answer in arm.answers]
    by = choice.decoding(ids.device, cache, None, None, {"do_sample": False}, outlives=False)
    decode(
        model, cache, ids.repeat(count, 1), mask.repeat(count, 1), answers, list(limits) * count, stops, pad, least,
        by.method,
    )  # fmt: skip
    for arm in arms:  # what only its own cache can tell, and only now
        arm.notes = [*(cache.notes if count == 1 else arm.notes), *by.notes]
