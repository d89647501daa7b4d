"""A sample of random passages for a tiny model, and what stock transformers makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny_models import build_tokenizer, random_ids
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvfoundry import compat
from kvfoundry.chunks import ChunkStore
from kvfoundry.evaluate.tasks.ragqa_data import Passage, RagSample
from kvfoundry.method import Method
from kvfoundry.rag.making import Maker
from kvfoundry.rag.prompts import Candidate, Laid

HEAD, QUESTION = 5, 11
LENGTHS = (9, 7, 12, 8)


def laid(lengths: Sequence[int] = LENGTHS, *, found: int = 2, behind: str = "head", seed: int = 0) -> Laid:
    """A prompt of random tokens; the last candidate has rank 0, and the best `found` may begin on the device."""
    head = tuple(random_ids(HEAD, seed=seed + 100).tolist())
    candidates, at, before = [], HEAD, head
    for number, length in enumerate(lengths):
        ids = tuple(random_ids(length, seed=seed + number).tolist())
        rank = len(lengths) - 1 - number
        context = {"head": head, "start": (), "sample": before}[behind]
        candidates.append(Candidate(f"p{number}", Passage("", f"p{number}"), rank, rank < found, ids, at, context))
        at, before = at + length, before + ids
    sample = RagSample("one", "what?", ("w5 w6",), tuple(each.passage for each in candidates))
    return Laid(sample, head, tuple(candidates), tuple(random_ids(QUESTION, seed=seed + 50).tolist()))


@contextmanager
def maker_of(model: PreTrainedModel, folder: Path | None = None, **how: Any) -> Iterator[Maker]:
    """A maker over a store in memory."""
    with ChunkStore("host:64MiB") as store:
        yield Maker(model, build_tokenizer(), store, how.pop("method", Method.parse("fullkv")), folder, **how)


@torch.no_grad()
def passage_rows(model: PreTrainedModel, prompt: Laid) -> list[list[tuple[Tensor, Tensor]]]:
    """Rows of head and candidates at their places, by stock transformers: per part, per layer, keys and values.

    Each is read behind what it is read behind, standing where it will stand: the context in front of it is turned away
    with it, which changes nothing of values, and keys by a rotation alone.
    """
    parts = [(prompt.head, (), 0), *((each.token_ids, each.behind, each.at) for each in prompt.candidates)]
    found = []
    for ids, behind, at in parts:
        cache = DynamicCache()
        places = torch.arange(at - len(behind), at + len(ids))
        model(
            torch.tensor([[*behind, *ids]]), position_ids=places[None], use_cache=True, **{compat.CACHE_ARGUMENT: cache}
        )
        found.append([(layer.keys[:, :, len(behind) :], layer.values[:, :, len(behind) :]) for layer in cache.layers])
    return found


@torch.no_grad()
def reference(
    model: PreTrainedModel,
    prompt: Laid,
    calls: Sequence[tuple[Sequence[int], Sequence[int]]],
    window: int | None = None,
) -> list[Tensor]:
    """Logits [tokens, vocabulary] of calls by stock transformers: of each the ids, and which candidates it may see."""
    rows, cache = passage_rows(model, prompt), DynamicCache()
    for layer in range(len(rows[0])):
        cache.update(*(torch.cat([part[layer][side] for part in rows], dim=2) for side in (0, 1)), layer)
    there, logits = torch.arange(prompt.question_at), []
    for ids, seen in calls:
        places = torch.arange(len(there), len(there) + len(ids))
        there = torch.cat([there, places])
        sees = there <= places[:, None]
        if window is not None:
            sees &= there > places[:, None] - window
        for number, (start, stop) in enumerate(prompt.spans):
            if number not in seen:
                sees[:, start:stop] = False
        mask = torch.where(sees, 0.0, torch.finfo(torch.float32).min)[None, None]
        output = model(torch.tensor([list(ids)]), mask, places[None], use_cache=True, **{compat.CACHE_ARGUMENT: cache})
        logits.append(output.logits[0])
    return logits
