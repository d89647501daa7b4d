"""One document, many questions: the document is read once and its cache forked for each question.

The rival reads document and question anew every time. Under a method the two may answer differently, for a reason: a
forked cache was evicted before the question was known.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import kvfoundry
from kvfoundry import compat
from kvfoundry.devices import input_device
from kvfoundry.evaluate.metrics import score_answers
from kvfoundry.evaluate.prompts import encode_prompt
from kvfoundry.feeding import check_length


@dataclass(frozen=True)
class ReuseResult:
    """Times in seconds over all questions; scores are means of the share of the answer recovered."""

    method: str
    questions: int
    document_tokens: int
    stored_bytes: int
    forked_seconds: float
    fresh_seconds: float
    forked_score: float
    fresh_score: float
    same_answers: int


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Length of the longest common prefix of all sequences."""
    shortest = min(len(sequence) for sequence in sequences)
    for index in range(shortest):
        if len({sequence[index] for sequence in sequences}) > 1:
            return index
    return shortest


def _answer(model: Any, tokenizer: Any, ids: Sequence[int], cache: Any, max_new_tokens: int) -> str:
    inputs = torch.tensor([list(ids)], device=input_device(model))
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        **{compat.CACHE_ARGUMENT: cache},
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    return tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)


def compare_reuse(
    model: Any,
    tokenizer: Any,
    method: Any,
    prompts: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    chat: bool,
    max_new_tokens: int = 24,
) -> ReuseResult:
    """Answer prompts that begin with one document, from forks of its cache and from scratch, and time both.

    Args:
        prompts: at least two; what they share at the start is the document.
        references: the answers to each prompt.

    Raises:
        KVFoundryError: a prompt that does not fit the model.
        ValueError: fewer than two prompts, or nothing shared at the start.
    """
    encoded = [encode_prompt(tokenizer, prompt, chat) for prompt in prompts]
    for number, ids in enumerate(encoded, start=1):
        check_length(model, len(ids), max_new_tokens, f"question {number}")
    # Each prompt keeps a token of its own: a model must be fed something to answer.
    shared = min(common_prefix(encoded), min(map(len, encoded)) - 1) if len(encoded) > 1 else 0
    if shared == 0:
        raise ValueError("give at least two prompts that begin with the same document")
    fresh = [0.0, 0.0]
    forked = [0.0, 0.0]
    same = 0
    began = time.perf_counter()
    document = kvfoundry.KVCache(model, method)
    # One new token runs the prompt and is itself never stored: the cache then holds the document and nothing else.
    _answer(model, tokenizer, encoded[0][:shared], document, max_new_tokens=1)
    forked[0] += time.perf_counter() - began
    for ids, answers in zip(encoded, references, strict=True):
        began = time.perf_counter()
        from_fork = _answer(model, tokenizer, ids, document.fork(), max_new_tokens)
        forked[0] += time.perf_counter() - began
        began = time.perf_counter()
        from_scratch = _answer(model, tokenizer, ids, kvfoundry.KVCache(model, method), max_new_tokens)
        fresh[0] += time.perf_counter() - began
        forked[1] += score_answers(answers, from_fork)[0] / len(encoded)
        fresh[1] += score_answers(answers, from_scratch)[0] / len(encoded)
        same += from_fork == from_scratch
    return ReuseResult(
        method=str(method),
        questions=len(encoded),
        document_tokens=shared,
        stored_bytes=document.nbytes,
        forked_seconds=forked[0],
        fresh_seconds=fresh[0],
        forked_score=forked[1],
        fresh_score=fresh[1],
        same_answers=same,
    )
