"""The report as HTML: what was run, the guards, the board, the plots, and the browser of single answers.

Everything that comes from a run is escaped, or stands in a data element that scripts read as text. The page's policy
lets run the one script that it carries, by its hash, and forbids every fetch.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from kvfoundry.evaluate.board import Row, board_of, columns_of, pick_columns, sort_rows
from kvfoundry.evaluate.compare import Comparison
from kvfoundry.evaluate.guards import flags_of
from kvfoundry.evaluate.recipes import FULL, split_budget
from kvfoundry.evaluate.report.answers import answers_data, script_json, shown_items
from kvfoundry.evaluate.report.marks import Mark, marks_of
from kvfoundry.evaluate.report.plots import curves, heat_map, pareto_plot, ramp_legend
from kvfoundry.evaluate.report.table import board_table, breakable
from kvfoundry.evaluate.results import Line
from kvfoundry.evaluate.runs import Run
from kvfoundry.evaluate.summary import grid, group_by, summarise

# More heat maps of a task than this are folded away.
_MOST_MAPS = 12


@cache
def _resource(name: str) -> str:
    return files("kvfoundry.evaluate.report").joinpath(name).read_text(encoding="utf-8")


def _document(title: str, body: str, data: Any = None) -> str:
    script, digest = "", "'none'"
    if data is not None:
        code = _resource("page.js")
        digest = f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
        script = f'<script type="application/json" id="data">{script_json(data)}</script><script>{code}</script>'
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {digest}; base-uri 'none'; form-action 'none'"
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_resource('style.css')}</style></head>"
        f"<body><main>{body}</main>{script}</body></html>\n"
    )
    return page.encode("utf-8", "replace").decode()  # half a surrogate pair in a prediction cannot be written


def render_report(run: Run, columns: Sequence[str] = (), sort: str | None = None) -> str:
    """The whole page of one run.

    Args:
        columns: names of the board's columns to show, in this order; all of them by default.
        sort: name of the column that orders the board, best first; the order of the run by default.

    Raises:
        DataError: an unknown column.
    """
    rows = board_of(run.lines)
    tasks = list(dict.fromkeys(line["task"] for line in run.lines))
    known = columns_of(run.lines)
    shown = pick_columns(known, columns)
    if sort is not None:
        rows = sort_rows(rows, pick_columns(known, [sort])[0])
    marks = marks_of(list(dict.fromkeys(split_budget(method)[0] for method in run.methods)))
    items = shown_items(run)
    sections = [
        _header(run, tasks),
        _flags(run),
        _failures(run.lines),
        board_table(rows, shown, sort),
        _pareto(rows, marks),
        _curves(run.lines, marks),
        _heat_maps(run.lines),
        _notes(run.lines),
        _browser(run, tasks, len(items)),
    ]
    return _document("kvfoundry report", "".join(sections), answers_data(run, items))


def _header(run: Run, tasks: Sequence[str]) -> str:
    items = len({(line["task"], line["item"]) for line in run.lines})
    methods = len(run.methods)
    machine, versions = run.meta.get("machine", {}), run.meta.get("versions", {})
    facts = {
        "model": run.arguments.get("model"),
        "dtype": run.meta.get("dtype"),
        "device": machine.get("device"),
        "tasks": ", ".join(tasks),
        "items": items,
        "methods": methods,
        "seed": run.arguments.get("seed"),
        "kvfoundry": versions.get("kvfoundry"),
        "transformers": versions.get("transformers"),
    }
    shown = "".join(
        f"<div><dt>{name}</dt><dd>{escape(str(value))}</dd></div>" for name, value in facts.items() if value is not None
    )
    missing = (
        f'<p class="warn">Unfinished: {run.missing} answers are still to come; the figures are of those there are.</p>'
        if run.missing
        else ""
    )
    return f'<h1>What each method keeps, and what it costs</h1><dl class="facts">{shown}</dl>{missing}'


def _flags(run: Run) -> str:
    flags = flags_of(run)
    if not flags:
        return '<p class="quiet">Every method was given the same prompt token ids. No guard was tripped.</p>'
    # as they are written: most begin with the name of a task or a method
    shown = "".join(f"<li>{escape(flag['message'])}.</li>" for flag in flags)
    return f'<section class="warn"><h2>Read this first</h2><ul>{shown}</ul></section>'


def _failures(lines: Sequence[Line]) -> str:
    failed = [line for line in lines if line.get("error")]
    if not failed:
        return ""
    shown = "".join(
        f"<li><code>{escape(line['method'])}</code>, {escape(line['item'])}: {escape(line['error'])}</li>"
        for line in failed[:10]
    )
    return f'<section class="warn"><h2>Failed items, in no average: {len(failed)}</h2><ul>{shown}</ul></section>'


def _legend(families: Sequence[str], marks: Mapping[str, Mark]) -> str:
    shown = "".join(
        f'<li><svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true">{marks[family].svg(8, 8, 5)}</svg>'
        f"<code>{breakable(family)}</code></li>"
        for family in families
    )
    return f'<ul class="legend">{shown}</ul>'


def _pareto(rows: Sequence[Row], marks: Mapping[str, Mark]) -> str:
    wide, narrow = pareto_plot(rows, marks, 1160), pareto_plot(rows, marks, 326)
    if not wide:
        return ""
    families = list(dict.fromkeys(split_budget(row["method"])[0] for row in rows))
    return (
        '<section id="pareto"><h2>Score against memory</h2>'
        '<p class="quiet">Filled marks on the line are the front: up is better, left is smaller.</p>'
        f'<figure><div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
        f"{_legend(families, marks)}</figure></section>"
    )


def _curves(lines: Sequence[Line], marks: Mapping[str, Mark]) -> str:
    """A plot per task and kind of budget in which some recipe has at least two budgets."""
    figures: list[str] = []
    drawn: dict[str, None] = {}
    for (task,), group in group_by(lines, "task").items():
        scores = {row["method"]: row["score"] for row in summarise(group) if row["score"] is not None}
        for shares in (False, True):
            series: dict[str, list[tuple[float, float]]] = {}
            for method, score in scores.items():
                family, budget = split_budget(method)
                if budget is not None and isinstance(budget, float) == shares:
                    series.setdefault(family, []).append((budget, score))
            if all(len(points) < 2 for points in series.values()):
                continue
            drawn |= dict.fromkeys(series)
            plot = curves(series, scores.get(FULL), marks, shares=shares)
            figures.append(f"<figure><figcaption>{escape(task)}</figcaption>{plot}</figure>")
    if not figures:
        return ""
    dashed = " The dashed line is the full cache." if any(line["method"] == FULL for line in lines) else ""
    return (
        f'<section id="curves"><h2>Score over the budget</h2><p class="quiet">One plot per task.{dashed}</p>'
        f'{_legend(list(drawn), marks)}<div class="maps">{"".join(figures)}</div></section>'
    )


def _heat_maps(lines: Sequence[Line]) -> str:
    sections = []
    for (task,), group in group_by(lines, "task").items():
        maps = [
            f"<figure><figcaption><code>{breakable(method)}</code></figcaption>{heat_map(scores)}</figure>"
            for (method,), of_method in group_by(group, "method").items()
            if (scores := grid(of_method))
        ]
        if maps:
            drawn = f'<div class="maps">{"".join(maps)}</div>'
            folded = "" if len(maps) <= _MOST_MAPS else f"<details><summary>{len(maps)} maps</summary>{drawn}</details>"
            sections.append(f"<h3>{escape(task)}</h3>{folded or drawn}")
    if not sections:
        return ""
    return f'<section id="needles"><h2>Score by length and depth</h2>{ramp_legend()}{"".join(sections)}</section>'


def _notes(lines: Sequence[Line]) -> str:
    sections = ""
    for heading, who, field in (
        ("What to know of the tasks", "task", "task_notes"),
        ("What the methods say of themselves", "method", "notes"),
    ):
        found = {(line[who], note): None for line in lines for note in line.get(field, ())}
        notes = "".join(f"<li><code>{escape(name)}</code>: {escape(note)}</li>" for name, note in found)
        sections += f'<section class="quiet"><h2>{heading}</h2><ul>{notes}</ul></section>' if notes else ""
    return sections


def _options(names: Sequence[str]) -> str:
    return '<option value="">all</option>' + "".join(
        f'<option value="{escape(name)}">{escape(name)}</option>' for name in names
    )


def _browser(run: Run, tasks: Sequence[str], shown: int) -> str:
    items = len({(line["task"], line["item"]) for line in run.lines})
    part = f" This page holds {shown} of {items} items, spread evenly; results.jsonl has all." if shown < items else ""
    text = "" if run.prompts else " The prompts' texts are not in this folder."
    return (
        '<section id="answers"><h2>Answers</h2><p class="quiet">Choose an answer to see its prompt, shaded by the rows '
        f"that the cache still held when the prompt had been read.{part}{text}</p>"
        '<div class="filters" role="group" aria-label="filters">'
        f'<label>task <select id="by-task">{_options(tasks)}</select></label>'
        f'<label>method <select id="by-method">{_options(run.methods)}</select></label>'
        '<label>text <input type="search" id="by-text" placeholder="in item, answer or reference"></label>'
        '<label class="check"><input type="checkbox" id="wrong"> wrong only</label>'
        '<output id="count"></output></div>'
        '<div class="browser"><div><ol id="list"></ol><button type="button" id="more">show more</button></div>'
        '<article id="detail" aria-live="polite"></article></div>'
        "<noscript><p>The browser of answers needs JavaScript; the figures above do not.</p></noscript></section>"
    )


def render_comparison(comparison: Comparison) -> str:
    """The page of two runs side by side."""
    columns = ("items", "A", "B", "B - A", "95 % interval", "verdict")
    head = '<th scope="col">task</th><th scope="col" class="text">method</th>'
    head += "".join(f'<th scope="col">{name}</th>' for name in columns)
    body = []
    for row in comparison.rows:
        found = row.difference
        other = "" if row.first == row.second else f"<small>B: <code>{breakable(row.second)}</code></small>"
        cells = [
            f'<th scope="row">{escape(row.task or "all tasks")}</th>',
            f'<td class="text"><code>{breakable(row.first)}</code>{other}</td>',
            f"<td>{found.items}</td><td>{found.first:.3f}</td><td>{found.second:.3f}</td><td>{found.mean:+.3f}</td>",
            f"<td>{found.low:+.3f} … {found.high:+.3f}</td>",
            f'<td class="{found.verdict}" title="{escape(found.reason)}">{found.verdict}</td>',
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    remarks = "".join(f"<li>{escape(remark)}.</li>" for remark in comparison.remarks)
    return _document(
        "kvfoundry: two runs",
        f'<h1>Two runs, item by item</h1><dl class="facts"><div><dt>A</dt><dd>{escape(comparison.first)}</dd></div>'
        f"<div><dt>B</dt><dd>{escape(comparison.second)}</dd></div></dl>"
        '<p class="quiet">Differences of mean scores over the items that both runs answered, with a bootstrap '
        "interval; noise is what such a sample cannot tell from nothing.</p>"
        + (f'<section class="warn"><ul>{remarks}</ul></section>' if remarks else "")
        + '<div class="scroll" tabindex="0" role="region" aria-label="differences">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>",
    )
