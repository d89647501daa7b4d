"""What is asked of a model, in pieces that can be sent elsewhere, and the result lines that come back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import kvfoundry
from kvfoundry.evaluate.prompts import line_stops
from kvfoundry.evaluate.results import Line
from kvfoundry.evaluate.tasks.base import Item, MeasuredTask, ScoringTask, Task
from kvfoundry.generation import Generation
from kvfoundry.method import Method

# Fields of a Generation that a result line takes over as they are.
_MEASURED = (
    "prompt_tokens", "new_tokens", "stored_bytes", "peak_bytes", "full_bytes", "parked_bytes", "kept_rows",
    "kept_share", "kept_profile", "prefill_share", "ttft_seconds", "ms_per_token", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What all pieces of a run have in common; tasks and arms are named by their place in it."""

    tasks: Sequence[Task | MeasuredTask]
    arms: Sequence[Method]
    seed: int
    prefill_chunk: int | None = None


@dataclass(frozen=True)
class Question:
    """One item. chat: its prompt goes into the template; hidden: tokens at its end that a method may not see."""

    task: int
    item: Item
    chat: bool
    hidden: int
    prompt_tokens: int


@dataclass(frozen=True)
class Work:
    """Questions that are asked in one batch. together: the methods read them together, see `generate_together`."""

    arms: tuple[int, ...]
    questions: tuple[Question, ...]
    together: bool = False


# For every method of a piece of work, a line for every question.
Answers = list[list[Line]]


def answer(model: Any, tokenizer: Any, job: Job, work: Work) -> Answers:
    """Ask. Whatever goes wrong is narrowed down to the one method and the one question that cannot be answered.

    A batch that memory does not hold is asked in halves; methods that cannot read together read one after the other.
    """
    alone = ""
    if work.together:
        try:
            return _together(model, tokenizer, job, work)
        except torch.OutOfMemoryError as error:
            alone = _told(error)
            halves = _halves(work.questions)
        except Exception as error:  # as below
            alone, halves = _told(error), ()
        if halves:  # outside of the handler, whose traceback holds on to the memory
            answers = [answer(model, tokenizer, job, replace(work, questions=half)) for half in halves]
            return [first + second for first, second in zip(*answers, strict=True)]
    found = [_one_method(model, tokenizer, job, arm, work.questions) for arm in work.arms]
    if alone:
        for line in (line for lines in found for line in lines):
            line["notes"] = [*line["notes"], f"read its prompts alone, for together with other methods: {alone}"]
    return found


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _halves(questions: Sequence[Question]) -> tuple[tuple[Question, ...], ...]:
    """Two parts of a batch; none where it cannot be divided."""
    middle = len(questions) // 2
    return (tuple(questions[:middle]), tuple(questions[middle:])) if middle else ()


def failed(reason: str) -> Line:
    """The line of an item that could not be answered."""
    unknown = dict.fromkeys(("prediction", "score", "exact", "stored_bytes", "kept_rows", "seconds"))
    return {**unknown, "notes": [], "error": reason}


def _one_method(model: Any, tokenizer: Any, job: Job, arm: int, batch: Sequence[Question]) -> list[Line]:
    try:
        return _ask(model, tokenizer, job, job.arms[arm], batch)
    except Exception as error:  # whatever one item does, the others must still run
        if len(batch) == 1:
            return [failed(_told(error))]
    return [line for half in _halves(batch) for line in _one_method(model, tokenizer, job, arm, half)]


def _ask(model: Any, tokenizer: Any, job: Job, method: Method, batch: Sequence[Question]) -> list[Line]:
    task, first = job.tasks[batch[0].task], batch[0]
    if isinstance(task, MeasuredTask):
        return task.measure(model, tokenizer, method, [question.item for question in batch], job.prefill_chunk)
    generations = kvfoundry.generate(
        model,
        tokenizer,
        [question.item.prompt for question in batch],
        method=method,
        max_new_tokens=first.item.max_new_tokens,
        prefill_chunk=job.prefill_chunk,
        batch_size=len(batch),
        details=True,
        do_sample=False,
        **_shared(model, tokenizer, job, batch),
    )
    return _lines(job, batch, generations)


def _together(model: Any, tokenizer: Any, job: Job, work: Work) -> Answers:
    batch = work.questions
    found = kvfoundry.generate_together(
        model,
        tokenizer,
        [question.item.prompt for question in batch],
        [job.arms[arm] for arm in work.arms],
        [question.item.max_new_tokens for question in batch],
        **_shared(model, tokenizer, job, batch),
    )
    return [_lines(job, batch, generations) for generations in found]


def _shared(model: Any, tokenizer: Any, job: Job, batch: Sequence[Question]) -> Mapping[str, Any]:
    """Arguments that both ways of asking have in common."""
    return {
        "chat": batch[0].chat,
        "answer_prefix": [question.item.answer_prefix for question in batch],
        "hold_back": batch[0].hidden,
        "seed": job.seed,
        **(line_stops(model, tokenizer) if batch[0].item.line_ends else {}),
    }


def _lines(job: Job, batch: Sequence[Question], generations: Sequence[Generation]) -> list[Line]:
    lines = []
    for question, generation in zip(batch, generations, strict=True):
        if generation.prompt_tokens != question.prompt_tokens:
            raise AssertionError(
                f"the model saw {generation.prompt_tokens} prompt tokens, {question.prompt_tokens} were meant"
            )
        task: Any = job.tasks[question.task]
        score, exact = task.score(question.item, generation.text)
        measured = {name: getattr(generation, name) for name in _MEASURED}
        if isinstance(task, ScoringTask):
            measured |= task.more_scores(question.item, generation.text)
        if question.item.notes:
            measured["task_notes"] = list(question.item.notes)
        lines.append(
            {"prediction": generation.text, "score": score, "exact": exact, **measured, "notes": list(generation.notes)}
        )
    return lines
