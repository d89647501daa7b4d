"""Answers to questions over documents: the part of `kvfoundry.generate` that reads chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfoundry.blend.reuse import blended_cache, documents_of
from kvfoundry.blend.spec import Blend
from kvfoundry.chunks import ChunkStore
from kvfoundry.generation import Generation, generate_ids
from kvfoundry.method import Method


def answers_over(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    documents: Sequence[str] | Sequence[Sequence[str]],
    method: Method,
    max_new_tokens: int,
    *,
    batch_size: int,
    chat: bool,
    answer_prefixes: Sequence[str],
    store: ChunkStore | None,
    blend: str | Blend,
    chunk_method: str | Method | None,
    head: str,
    namespace: str,
    **decoding: Any,
) -> list[Generation]:
    """An answer to every question over its own documents, in batches; see `kvfoundry.generate`.

    Looking chunks up, making and blending them are inside the time to the first token.
    """
    answers = []
    batches = documents_of(documents, questions)
    for start in range(0, len(questions), batch_size):
        batch = slice(start, start + batch_size)
        began = time.perf_counter()
        prompts = blended_cache(
            model, tokenizer, batches[batch], questions[batch], store=store, blend=blend, method=method,
            chunk_method=chunk_method, head=head, chat=chat, answer_prefix=answer_prefixes[batch],
            namespace=namespace, max_new_tokens=max_new_tokens,
        )  # fmt: skip
        blended, spent = prompts.blended, time.perf_counter() - began
        copies = max(_asked(decoding, "num_beams"), _asked(decoding, "num_return_sequences"))
        if copies > 1:  # transformers repeats the ids, not what a cache has seen
            blended.cache.batch_repeat_interleave(copies)
        found = generate_ids(
            model, tokenizer, blended.question_ids, blended.question_mask, method, max_new_tokens,
            cache=blended.cache, context=(blended.context_ids, blended.context_mask), **decoding,
        )  # fmt: skip
        copies = len(found) // len(prompts.segments)
        for number, answer in enumerate(found):
            row = number // copies
            answers.append(
                replace(
                    answer,
                    ttft_seconds=None if answer.ttft_seconds is None else answer.ttft_seconds + spent,
                    seconds=answer.seconds + spent,
                    notes=[*answer.notes, *prompts.notes[row]],
                    reused_tokens=prompts.reused_tokens[row],
                    recomputed_tokens=blended.recomputed_tokens[row],
                    store_report=None if store is None else prompts.report.as_dict(),
                )
            )
    return answers


def _asked(decoding: dict[str, Any], name: str) -> int:
    """An option of decoding, from the keywords or from a generation config; 1 where neither has it."""
    found = decoding.get(name) or getattr(decoding.get("generation_config"), name, None)
    return found or 1
