"""The data behind the item browser: every answer with its prompt's ends, as JSON that is safe inside a page."""

import json
from collections.abc import Sequence
from typing import Any

from kvfoundry.evaluate.results import Line
from kvfoundry.evaluate.runs import Run

# So many answers keep a page below about ten megabytes.
MOST_ANSWERS = 4000


def shown_items(run: Run, most: int = MOST_ANSWERS) -> list[tuple[str, str]]:
    """The items (task, item) that a page holds: all of them, or an even spread where their answers are too many."""
    items = list(dict.fromkeys((line["task"], line["item"]) for line in run.lines))
    room = max(1, most // len(run.methods))
    if len(items) <= room:
        return items
    return [items[number * len(items) // room] for number in range(room)]


def answers_data(run: Run, items: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Lists that name each other by number: methods, prompts [of an item], answers [of a prompt under a method]."""
    methods = {method: number for number, method in enumerate(run.methods)}
    texts = {(prompt["task"], prompt["item"]): prompt for prompt in run.prompts}
    numbers = {item: number for number, item in enumerate(items)}
    prompts: list[dict[str, Any] | None] = [None] * len(items)
    answers = []
    for line in run.lines:
        number = numbers.get((line["task"], line["item"]))
        if number is None:
            continue
        if prompts[number] is None:
            prompts[number] = _prompt(line, texts.get((line["task"], line["item"]), {}))
        answers.append(_answer(line, number, methods[line["method"]]))
    return {"methods": list(methods), "prompts": prompts, "answers": answers}


def _prompt(line: Line, text: dict[str, Any] | Any) -> dict[str, Any]:
    return {
        "task": line["task"],
        "item": line["item"],
        "references": line["references"],
        "tokens": line.get("prompt_tokens") or text.get("prompt_tokens"),
        "head": text.get("head"),
        "headSizes": text.get("head_sizes"),
        "tail": text.get("tail"),
        "tailSizes": text.get("tail_sizes"),
    }


def _answer(line: Line, prompt: int, method: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "method": method,
        "score": line.get("score"),
        "right": bool(line.get("exact")),
        "text": line.get("prediction"),
        "error": line.get("error"),
        "kept": line.get("kept_profile"),
        "keptShare": line.get("kept_share"),
        "bytes": line.get("stored_bytes"),
    }


def script_json(value: Any) -> str:
    """JSON for a script element of a data type: no character in it can end the element or begin markup."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
