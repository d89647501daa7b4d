"""Greedy decoding of many rows at once: by the engine where it serves them, else by a loop that rows leave early."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from kvfoundry import compat
from kvfoundry.cache import KVCache
from kvfoundry.generation import until_stop

# Tokens between two looks at which rows have ended, and the share of rows that must have for the rest to move together.
_STRIDE = 8
_ENDED = 0.25


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    cache: KVCache,
    ids: Tensor,
    mask: Tensor,
    answers: Sequence[list[int]],
    limits: Sequence[int],
    stops: Collection[int],
    pad: int,
    least: int = 0,
    by: Callable[..., Tensor] | None = None,
) -> None:
    """Go on with the answer of every row of a cache until it stops or has as many tokens as its limit.

    ids, mask: [rows, columns] of the prompts, left-padded. answers: at least the first token of each row, the only one
    that the cache has not seen; the lists grow. stops: tokens that end an answer, where it has `least` tokens already.
    by: a decoding method for `model.generate`, whose rows stay together to the end: a step of fixed shape costs no less
    for rows that have left.
    """
    if by is not None:
        _at_once(model, cache, ids, mask, answers, limits, stops, pad, least, by)
        return
    rows = list(range(len(answers)))  # of the batch, by their number in `answers`
    while True:
        places = [place for place, row in enumerate(rows) if not _ended(answers[row], limits[row], stops)]
        if not places:
            return
        if len(places) <= (1 - _ENDED) * len(rows):
            index = torch.tensor(places)
            cache.batch_select_indices(index)
            ids, mask = ids[index.to(ids.device)], mask[index.to(mask.device)]
            rows, places = [rows[place] for place in places], list(range(len(places)))
        done = len(answers[rows[places[0]]])  # of every row that goes on: they grow together
        steps = min(_STRIDE, max(limits[rows[place]] for place in places) - done)
        given = torch.tensor([_filled(answers[row], done, pad) for row in rows], device=ids.device)
        output = model.generate(  # type: ignore[operator]
            torch.cat([ids, given], dim=1),
            attention_mask=torch.cat([mask, mask.new_ones(given.shape)], dim=1),
            **{compat.CACHE_ARGUMENT: cache},
            max_new_tokens=steps,
            min_new_tokens=max(0, least - done) or None,
            do_sample=False,
            eos_token_id=list(stops) or None,
            pad_token_id=pad,
        )
        new = output[:, ids.shape[1] + done :].tolist()
        for place in places:
            row = rows[place]
            answers[row] += until_stop(new[place], stops)
            del answers[row][limits[row] :]


def _at_once(
    model: PreTrainedModel,
    cache: KVCache,
    ids: Tensor,
    mask: Tensor,
    answers: Sequence[list[int]],
    limits: Sequence[int],
    stops: Collection[int],
    pad: int,
    least: int,
    by: Callable[..., Tensor],
) -> None:
    left = [
        limit - len(answer) if answer[-1] not in stops else 0 for limit, answer in zip(limits, answers, strict=True)
    ]
    if max(left, default=0) <= 0:
        return
    given = torch.tensor([answer[:1] for answer in answers], device=ids.device)
    text = torch.cat([ids, given], dim=1)
    output = model.generate(  # type: ignore[operator]
        text,
        attention_mask=torch.cat([mask, mask.new_ones(given.shape)], dim=1),
        **{compat.CACHE_ARGUMENT: cache},
        max_new_tokens=max(left),
        min_new_tokens=max(0, least - 1) or None,
        do_sample=False,
        eos_token_id=list(stops) or None,
        pad_token_id=pad,
        stopping_criteria=StoppingCriteriaList([_Limits(text.shape[1], left)]),
        custom_generate=by,
    )
    for answer, room, new in zip(answers, left, output[:, text.shape[1] :].tolist(), strict=True):
        answer += until_stop(new, stops)[: max(0, room)]


class _Limits(StoppingCriteria):
    """Rows that have as many tokens behind the first `start` as they may have."""

    def __init__(self, start: int, limits: Sequence[int]):
        self.start, self.limits = start, torch.tensor(limits)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (self.limits <= input_ids.shape[1] - self.start).to(input_ids.device)


def _ended(answer: Sequence[int], limit: int, stops: Collection[int]) -> bool:
    return len(answer) >= limit or answer[-1] in stops


def _filled(answer: Sequence[int], length: int, pad: int) -> list[int]:
    """What is fed of a row that has ended stands for nothing; it only has to be as long as the others."""
    return [*answer[:length], *[pad] * (length - len(answer))]
