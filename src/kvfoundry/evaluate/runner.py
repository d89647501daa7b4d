"""Runs tasks x methods and keeps what came out: results.jsonl, prompts.jsonl, run_meta.json, summary.json, report.html.

Every method, the full cache among them, goes through the same `kvfoundry.generate` with the same prompt ids, backend,
dtype and prefill: what differs between two arms is the method alone.
"""

import hashlib
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import kvfoundry
from kvfoundry.attention import backend_of
from kvfoundry.evaluate.arms import expand_arms
from kvfoundry.evaluate.board import board_of
from kvfoundry.evaluate.excerpts import excerpt
from kvfoundry.evaluate.guards import Flag, flags_of
from kvfoundry.evaluate.prompts import encode_item, hash_ids, hidden_tokens, item_chat, line_stops, resolve_chat
from kvfoundry.evaluate.report import render_report
from kvfoundry.evaluate.results import FORMAT, META, SUMMARY, Line, ResultsFolder
from kvfoundry.evaluate.runs import read_run
from kvfoundry.evaluate.summary import group_by, shared_prompts, summarise
from kvfoundry.evaluate.tasks.base import Item, MeasuredTask, ScoringTask, Task, TaskError
from kvfoundry.feeding import check_length

# Fields of a Generation that a result line takes over as they are.
_MEASURED = (
    "prompt_tokens", "new_tokens", "stored_bytes", "peak_bytes", "full_bytes", "parked_bytes", "kept_rows",
    "kept_share", "kept_profile", "ttft_seconds", "ms_per_token", "seconds",
)  # fmt: skip


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
class _Question:
    task: Task | MeasuredTask
    item: Item
    chat: bool
    hidden: int
    prompt_tokens: int
    prompt_hash: str
    excerpt: Mapping[str, Any]

    @property
    def key(self) -> tuple[str, str]:
        return self.task.name, self.item.item

    def ends(self) -> Line:
        """The line of prompts.jsonl."""
        return {
            "task": self.task.name,
            "item": self.item.item,
            "prompt_tokens": self.prompt_tokens,
            "prompt_hash": self.prompt_hash,
            **self.excerpt,
        }

    def identity(self, method: str, seed: int) -> Line:
        """The fields of a result line that are known before the answer."""
        return {
            "task": self.task.name,
            "item": self.item.item,
            "method": method,
            "seed": seed,
            **self.item.cell,
            "prompt_tokens": self.prompt_tokens,
            "prompt_hash": self.prompt_hash,
            "references": list(self.item.references),
        }


def spread(items: Sequence[Any], limit: int | None) -> list[Any]:
    """At most `limit` items, spread evenly over the list so that a short run still sees the whole grid."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[index * len(items) // limit] for index in range(limit)]


def _git_commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def _versions() -> dict[str, str]:
    names = ("torch", "transformers")
    found = {"python": platform.python_version(), "kvfoundry": kvfoundry.__version__}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def _machine(model: Any) -> dict[str, Any]:
    device = next(model.parameters()).device
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


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


def _ask(model: Any, tokenizer: Any, method: Any, batch: Sequence[_Question], options: Mapping[str, Any]) -> list[Line]:
    task = batch[0].task
    if isinstance(task, MeasuredTask):
        return task.measure(model, tokenizer, method, [question.item for question in batch], options["prefill_chunk"])
    stops = line_stops(model, tokenizer) if batch[0].item.line_ends else {}
    generations = kvfoundry.generate(
        model,
        tokenizer,
        [question.item.prompt for question in batch],
        method=method,
        chat=batch[0].chat,
        answer_prefix=[question.item.answer_prefix for question in batch],
        max_new_tokens=batch[0].item.max_new_tokens,
        hold_back=batch[0].hidden,
        batch_size=len(batch),
        details=True,
        do_sample=False,
        **stops,
        **options,
    )
    lines = []
    for question, generation in zip(batch, generations, strict=True):
        if generation.prompt_tokens != question.prompt_tokens:
            raise AssertionError(
                f"the model saw {generation.prompt_tokens} prompt tokens, {question.prompt_tokens} were meant"
            )
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


def _failed(error: Exception) -> Line:
    unknown = dict.fromkeys(("prediction", "score", "exact", "stored_bytes", "kept_rows", "seconds"))
    return {**unknown, "notes": [], "error": f"{type(error).__name__}: {error}"}


def _answers(
    model: Any, tokenizer: Any, method: Any, batch: Sequence[_Question], options: Mapping[str, Any]
) -> list[Line]:
    """One line per question. When a batch fails, its questions are asked one by one: only the bad one is lost."""
    try:
        return _ask(model, tokenizer, method, batch, options)
    except Exception as error:  # whatever one item does, the others must still run
        if len(batch) == 1:
            return [_failed(error)]
    return [_answers(model, tokenizer, method, [question], options)[0] for question in batch]


def _questions(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task | MeasuredTask],
    chat: bool,
    seed: int,
    limit: int | None,
    hide_question: bool,
) -> list[_Question]:
    """Every item of every task with its token ids counted and hashed; refused when one does not fit the model."""
    questions = []
    for task in tasks:
        for item in spread(task.items(tokenizer, chat, seed), limit):
            ids = encode_item(tokenizer, item, chat)
            check_length(model, len(ids), item.max_new_tokens, f"prompt {item.item} of {task.name}")
            hidden = hidden_tokens(tokenizer, item, chat) if hide_question else 0
            ends = excerpt(tokenizer, ids)
            questions.append(_Question(task, item, item_chat(item, chat), hidden, len(ids), hash_ids(ids), ends))
    if not questions:
        raise TaskError("the tasks hold no items.")
    for key, count in Counter(question.key for question in questions).items():
        if count > 1:
            raise TaskError(f"item {key[1]} of {key[0]} occurs {count} times; a run needs names that tell items apart.")
    return questions


def _batches(questions: Sequence[_Question], batch_size: int) -> Iterator[Sequence[_Question]]:
    """Batches of one task, one use of the chat template, one number of hidden tokens and one end of the answer each.

    So a method sees of a prompt what it would see of it alone, and an answer is as long as it would be alone.
    Prompts of like length share a batch: padding takes memory that would be counted as theirs. The batches depend on
    the questions alone and not on which of them are answered already, so that a resumed run measures what an
    undisturbed one does.
    """
    groups: dict[tuple[int, ...], list[_Question]] = {}
    for question in questions:
        item = question.item
        alike_in = (id(question.task), question.chat, question.hidden, item.max_new_tokens, item.line_ends)
        groups.setdefault(alike_in, []).append(question)
    for alike in groups.values():
        if batch_size > 1:
            alike.sort(key=lambda question: question.prompt_tokens)
        for start in range(0, len(alike), batch_size):
            yield alike[start : start + batch_size]


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
    resume: bool = False,
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
        resume: go on with what `out` holds already.
        arguments: recorded as the run's arguments beside those given here, for example the name of the model.
        on_progress: called after every batch.

    Raises:
        KVFoundryError: everything that can be known before the first prompt: bad methods, prompts that do not fit, no
            items, an output folder that cannot be used or resumed.
    """
    if limit is not None and limit < 1:
        raise TaskError(f"limit {limit} leaves no items; give at least 1.")
    if batch_size < 1:
        raise TaskError(f"batch size {batch_size} is out of range; give at least 1.")
    arms = expand_arms(methods, budgets)
    for arm in arms:
        kvfoundry.KVCache(model, arm)  # refuses a method that this model cannot serve before any prompt runs
    chat = resolve_chat(tokenizer, chat)
    questions = _questions(model, tokenizer, tasks, chat, seed, limit, hide_question)
    settings = {
        **(arguments or {}),
        "tasks": [{"task": task.name, **task.settings()} for task in tasks],
        "methods": [str(arm) for arm in arms],
        "seed": seed,
        "limit": limit,
        "batch_size": batch_size,
        "chat": chat,
        "prefill_chunk": prefill_chunk,
        "hide_question": hide_question,
    }
    options = {"prefill_chunk": prefill_chunk, "seed": seed}
    shared = {
        "backend": backend_of(model),
        "prefill_chunk": prefill_chunk,
        "hide_question": hide_question,
        "batch_size": batch_size,
        "chat": chat,
    }
    meta: dict[str, Any] = {
        "format": FORMAT,
        "versions": _versions(),
        "git_commit": _git_commit(),
        "machine": _machine(model),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "command": sys.argv[1:],
        "arguments": settings,
    }
    with ResultsFolder(out, settings, resume) as folder:
        folder.write_json(META, meta)
        folder.write_prompts([question.ends() for question in questions])
        total, began, fresh = len(arms) * len(questions), time.perf_counter(), 0
        for arm in arms:
            for batch in _batches(questions, batch_size):
                waiting = {question.key for question in batch if (*question.key, str(arm)) not in folder.finished}
                if not waiting:
                    continue
                answers = zip(batch, _answers(model, tokenizer, arm, batch, options), strict=True)
                pairs = [(question, answer) for question, answer in answers if question.key in waiting]
                folder.append([question.identity(str(arm), seed) | answer for question, answer in pairs])
                fresh += len(waiting)
                if on_progress:
                    done = len(folder.finished)
                    left = (time.perf_counter() - began) / fresh * (total - done)
                    on_progress(Progress(done, total, str(arm), left))
        meta["arms"] = _arms_record(folder.lines, meta["dtype"], shared)
        meta["shared_prompts"] = shared_prompts(folder.lines)
        folder.write_json(META, meta)
        run = read_run(out)
        rows, board, flags = summarise(run.lines), board_of(run.lines), flags_of(run)
        folder.write_json(SUMMARY, {"rows": rows, "board": board, "warnings": flags})
        report = folder.write_report(render_report(run))
    return Outcome(rows, board, flags, sum(row["failed"] for row in rows), report)
