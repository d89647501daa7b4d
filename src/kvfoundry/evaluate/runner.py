"""Runs tasks x methods and keeps what came out: results.jsonl, prompts.jsonl, run_meta.json, summary.json, report.html.

Every method, the full cache among them, goes through the same `kvfoundry.generate` with the same prompt ids, backend,
dtype and prefill: what differs between two arms is the method alone. Where that happens, an executor decides.
"""

import hashlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvfoundry.evaluate.arms import expand_arms
from kvfoundry.evaluate.asking import Job, Question, Work
from kvfoundry.evaluate.board import board_of
from kvfoundry.evaluate.excerpts import excerpt
from kvfoundry.evaluate.executors import Executor, LocalExecutor
from kvfoundry.evaluate.guards import Flag, flags_of
from kvfoundry.evaluate.machine import git_commit, versions
from kvfoundry.evaluate.prompts import encode_item, hash_ids, hidden_tokens, item_chat, resolve_chat
from kvfoundry.evaluate.report import render_report
from kvfoundry.evaluate.results import FORMAT, META, SUMMARY, Line, ResultsFolder
from kvfoundry.evaluate.runs import read_run
from kvfoundry.evaluate.summary import group_by, shared_prompts, summarise
from kvfoundry.evaluate.tasks.base import MeasuredTask, Task, TaskError
from kvfoundry.feeding import check_length


@dataclass(frozen=True)
class Progress:
    """Where a run stands, after a batch; `method` is the one that was asked."""

    done: int
    total: int
    method: str
    seconds_left: float


@dataclass(frozen=True)
class Outcome:
    """What a run left behind.

    rows: per task and method. board: per method, over the tasks. flags: the guards that the run tripped. failed: items.
    """

    rows: list[dict[str, Any]]
    board: list[dict[str, Any]]
    flags: list[Flag]
    failed: int
    report: Path


@dataclass(frozen=True)
class _Asked:
    """A question, and what the record says of it that nobody needs who answers it."""

    question: Question
    task: str
    prompt_hash: str
    excerpt: Mapping[str, Any]

    @property
    def key(self) -> tuple[str, str]:
        return self.task, self.question.item.item

    def ends(self) -> Line:
        """The line of prompts.jsonl."""
        return {
            "task": self.task,
            "item": self.question.item.item,
            "prompt_tokens": self.question.prompt_tokens,
            "prompt_hash": self.prompt_hash,
            **self.excerpt,
        }

    def identity(self, method: str, seed: int) -> Line:
        """The fields of a result line that are known before the answer."""
        item = self.question.item
        return {
            "task": self.task,
            "item": item.item,
            "method": method,
            "seed": seed,
            **item.cell,
            "prompt_tokens": self.question.prompt_tokens,
            "prompt_hash": self.prompt_hash,
            "references": list(item.references),
        }


# Prompts of several tasks share a batch when the longest is at most so many times as long as the shortest.
_LIKE_LENGTH = 33 / 32


def spread(items: Sequence[Any], limit: int | None) -> list[Any]:
    """At most `limit` items, spread evenly over the list so that a short run still sees the whole grid."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[index * len(items) // limit] for index in range(limit)]


def _arms_record(lines: Sequence[Line], dtype: str, setting: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Per method, what it shared with the others: design law 10 made visible."""
    record = {}
    for (method,), group in group_by(lines, "method").items():
        hashes = sorted(f"{line['task']} {line['item']} {line['prompt_hash']}" for line in group)
        record[method] = {
            "dtype": dtype,
            **setting,
            "items": len(group),
            "prompts": hashlib.sha256("\n".join(hashes).encode()).hexdigest()[:16],
        }
    return record


def _questions(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task | MeasuredTask],
    chat: bool,
    seed: int,
    limit: int | None,
    hide_question: bool,
) -> list[_Asked]:
    """Every item of every task with its token ids counted and hashed; refused when one does not fit the model."""
    found = []
    for number, task in enumerate(tasks):
        for item in spread(task.items(tokenizer, chat, seed), limit):
            ids = encode_item(tokenizer, item, chat)
            check_length(model, len(ids), item.max_new_tokens, f"prompt {item.item} of {task.name}")
            hidden = hidden_tokens(tokenizer, item, chat) if hide_question else 0
            question = Question(number, item, item_chat(item, chat), hidden, len(ids))
            found.append(_Asked(question, task.name, hash_ids(ids), excerpt(tokenizer, ids)))
    if not found:
        raise TaskError("the tasks hold no items.")
    for key, count in Counter(asked.key for asked in found).items():
        if count > 1:
            raise TaskError(f"item {key[1]} of {key[0]} occurs {count} times; a run needs names that tell items apart.")
    return found


def _batches(questions: Sequence[Question], batch_size: int, mixed: bool) -> Iterator[tuple[Question, ...]]:
    """Batches of one task, one use of the chat template, one number of hidden tokens and one end of the answer each.

    So a method sees of a prompt what it would see of it alone, and an answer is as long as it would be alone.
    Prompts of like length share a batch: padding takes memory that would be counted as theirs. The batches depend on
    the questions alone and not on which of them are answered already, so that a resumed run measures what an
    undisturbed one does.
    mixed: questions of several tasks share a batch where their lengths differ by little; each has its own longest
    answer then.
    """
    groups: dict[tuple[int, ...], list[Question]] = {}
    for question in questions:
        item = question.item
        alike_in: tuple[int, ...] = (question.chat, question.hidden, item.line_ends)
        if not mixed:
            alike_in = (question.task, item.max_new_tokens, *alike_in)
        groups.setdefault(alike_in, []).append(question)
    for alike in groups.values():
        if batch_size > 1:
            alike.sort(key=lambda question: question.prompt_tokens)
        batch: list[Question] = []
        for question in alike:
            longest = question.prompt_tokens
            if len(batch) == batch_size or (mixed and batch and longest > _LIKE_LENGTH * batch[0].prompt_tokens):
                yield tuple(batch)
                batch = []
            batch.append(question)
        yield tuple(batch)


def _works(job: Job, asked: Sequence[_Asked], batch_size: int, together: int, timed: int) -> Iterator[Work]:
    """What there is to do, method after method; so many methods at a time read their prompts together.

    A measured task says itself how a method reads, so there each method is alone; so it is with the longest prompts,
    one at a time, of which the times are wanted.
    """
    shared: dict[bool, list[Question]] = {False: [], True: []}
    for item in asked:
        measured = isinstance(job.tasks[item.question.task], MeasuredTask)
        shared[together > 1 and not measured].append(item.question)
    if timed and shared[True]:
        longest = sorted(shared[True], key=lambda question: -question.prompt_tokens)[:timed]
        shared[True] = [question for question in shared[True] if question not in longest]
        yield from (Work((arm,), (question,)) for arm in range(len(job.arms)) for question in longest)
    for mixed, questions in shared.items():
        at_once = together if mixed else 1
        batches = list(_batches(questions, batch_size, mixed))
        for start in range(0, len(job.arms), at_once):
            arms = tuple(range(len(job.arms))[start : start + at_once])
            yield from (Work(arms, batch, mixed) for batch in batches)


def _unfinished(work: Work, waits: Callable[[int, Question], bool]) -> Work | None:
    """The work without methods that have answered all of its questions; None when nothing is left."""
    arms = tuple(arm for arm in work.arms if any(waits(arm, question) for question in work.questions))
    return replace(work, arms=arms) if arms else None


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task | MeasuredTask],
    methods: Sequence[str | Any],
    *,
    out: Path,
    budgets: Sequence[int | float] = (),
    seed: int = 0,
    limit: int | None = None,
    batch_size: int = 1,
    chat: bool | None = None,
    prefill_chunk: int | None = None,
    hide_question: bool = False,
    together: int = 1,
    timed: int = 0,
    resume: bool = False,
    executor: Executor | None = None,
    arguments: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Outcome:
    """Ask every item of every task under every method, and write the results folder `out`.

    Args:
        budgets: applied to each method that takes one; rows (int) or kept share (float).
        limit: items per task, spread over its grid.
        batch_size: prompts per generation. Answers, scores and kept rows do not depend on it; bytes and times are
            those of the batch, shared out.
        chat: None uses the tokenizer's chat template when there is one.
        hide_question: methods act before they see the question, as on a stored document.
        together: so many methods at a time read their prompts together and decode in common batches, as
            `kvfoundry.generate_together`: the same answers and bytes for a fraction of the time, but no times of a
            single method. 1 measures every method on its own.
        timed: so many of the longest prompts are answered by every method alone as well, one by one, for its times.
        resume: go on with what `out` holds already.
        executor: where it is answered; by default here, by `model`. With one that has models of its own, `model` is
            only asked for its config and may come from `kvfoundry.models.outline`.
        arguments: recorded as the run's arguments beside those given here, for example the name of the model.
        on_progress: called after every batch.

    Raises:
        KVFoundryError: everything that can be known before the first prompt: bad methods, prompts that do not fit, no
            items, workers that do not start, an output folder that cannot be used or resumed.
    """
    if limit is not None and limit < 1:
        raise TaskError(f"limit {limit} leaves no items; give at least 1.")
    for name, number in (("batch size", batch_size), ("together", together)):
        if number < 1:
            raise TaskError(f"{name} {number} is out of range; give at least 1.")
    if timed < 0 or (timed and together == 1):
        raise TaskError(f"timed {timed} is a number of prompts of a run with --together; without it all are timed.")
    if together > 1 and prefill_chunk is not None:
        raise TaskError("methods that read a prompt in pieces drop rows between them, so they cannot read it together; "
                        "leave out --together or --prefill-chunk.")  # fmt: skip
    arms = expand_arms(methods, budgets)
    job = Job(tasks, arms, seed, prefill_chunk)
    with executor or LocalExecutor(model, tokenizer) as workers:
        site = workers.start(job)  # refuses a method that this model cannot serve before any prompt runs
        chat = resolve_chat(tokenizer, chat)
        asked = _questions(model, tokenizer, tasks, chat, seed, limit, hide_question)
        shared = {
            "prefill_chunk": prefill_chunk,
            "hide_question": hide_question,
            "batch_size": batch_size,
            "chat": chat,
            **({"together": together, "timed": timed} if together > 1 else {}),
        }
        settings = {
            **(arguments or {}),
            "tasks": [{"task": task.name, **task.settings()} for task in tasks],
            "methods": [str(arm) for arm in arms],
            "seed": seed,
            "limit": limit,
            **shared,
        }
        meta: dict[str, Any] = {
            "format": FORMAT,
            "versions": versions(),
            "git_commit": git_commit(),
            "machine": site.machine,
            "dtype": site.dtype,
            "command": sys.argv[1:],
            "arguments": settings,
        }
        with ResultsFolder(out, settings, resume) as folder:
            folder.write_json(META, meta)
            folder.write_prompts([question.ends() for question in asked])
            _run(folder, workers, job, asked, _works(job, asked, batch_size, together, timed), on_progress)
            folder.arrange([(*question.key, str(arm)) for arm in arms for question in asked])
            meta["arms"] = _arms_record(folder.lines, site.dtype, {"backend": site.backend, **shared})
            meta["shared_prompts"] = shared_prompts(folder.lines)
            folder.write_json(META, meta)
    run = read_run(out)
    rows, board, flags = summarise(run.lines), board_of(run.lines), flags_of(run)
    folder.write_json(SUMMARY, {"rows": rows, "board": board, "warnings": flags})
    report = folder.write_report(render_report(run))
    return Outcome(rows, board, flags, sum(row["failed"] for row in rows), report)


def _run(
    folder: ResultsFolder,
    workers: Executor,
    job: Job,
    asked: Sequence[_Asked],
    works: Iterable[Work],
    on_progress: Callable[[Progress], None] | None,
) -> None:
    """Have done what the folder lacks, and append the lines of each piece of work as it comes back."""
    of_question = {id(item.question): item for item in asked}
    specs = [str(arm) for arm in job.arms]

    def waits(arm: int, question: Question) -> bool:
        return (*of_question[id(question)].key, specs[arm]) not in folder.finished

    unfinished = [rest for work in works if (rest := _unfinished(work, waits)) is not None]
    total, began, fresh = len(job.arms) * len(asked), time.perf_counter(), 0
    for work, answers in workers.answers(unfinished):
        lines = [
            of_question[id(question)].identity(specs[arm], job.seed) | line
            for arm, of_arm in zip(work.arms, answers, strict=True)
            for question, line in zip(work.questions, of_arm, strict=True)
            if waits(arm, question)
        ]
        folder.append(lines)
        fresh += len(lines)
        if on_progress:
            done = len(folder.finished)
            left = (time.perf_counter() - began) / fresh * (total - done)
            name = specs[work.arms[0]] if len(work.arms) == 1 else f"{len(work.arms)} methods"
            on_progress(Progress(done, total, name, left))
