"""report.html: one offline file, made from result lines alone, with a table of methods and a heat map per method.

Styles and drawings are inline; nothing is fetched. Colours are one light-to-dark ramp, so they stay ordered for
colour-blind readers and in grey print, and every cell carries its number.
"""

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Any

from kvfoundry.evaluate.results import Line
from kvfoundry.evaluate.summary import grid, group_by, shared_prompts, summarise

MIB = 1024 * 1024

_RAMP = ((0.0, (247, 251, 255)), (0.35, (158, 202, 225)), (0.7, (49, 130, 189)), (1.0, (8, 48, 107)))

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #fafafa; color: #1c2733; font: 16px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 1.6rem; margin: 0 0 4px; } h2 { font-size: 1.15rem; margin: 36px 0 10px; }
p { margin: 6px 0; max-width: 75ch; } .quiet { color: #556270; font-size: .9rem; }
.scroll { overflow-x: auto; background: #fff; border: 1px solid #dde3e9; border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 8px 12px; text-align: right; white-space: nowrap; border-bottom: 1px solid #eaeef2;
  vertical-align: baseline; }
th { font-size: .82rem; font-weight: 600; color: #556270; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 9.5rem; }
tr:last-child td { border-bottom: 0; }
code { overflow-wrap: anywhere; font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.bar { display: block; height: 4px; margin-top: 3px; border-radius: 2px; background: #e3eaf1; }
.bar i { display: block; height: 4px; border-radius: 2px; background: #2f7fb8; }
.maps { display: grid; margin-top: 12px; gap: 16px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); }
figure { margin: 0; padding: 12px; background: #fff; border: 1px solid #dde3e9; border-radius: 8px; overflow-x: auto; }
figcaption { font-size: .88rem; margin-bottom: 6px; overflow-wrap: anywhere; }
svg { display: block; max-width: 100%; height: auto; }
svg text { font: 13px system-ui, "Segoe UI", Roboto, Arial, sans-serif; fill: #556270; text-anchor: middle; }
.warn { border-left: 4px solid #c4572b; padding: 4px 12px; background: #fdf3ee; }
ul { margin: 6px 0; padding-left: 20px; }
"""


def _colour(value: float) -> tuple[str, str]:
    """Fill and text colour of a score in [0, 1]."""
    value = min(max(value, 0.0), 1.0)
    for (low, first), (high, second) in pairwise(_RAMP):
        if value <= high:
            share = (value - low) / (high - low)
            red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
            break
    return f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if value > 0.55 else "#1c2733"


def _number(value: float | None, pattern: str, scale: float = 1.0) -> str:
    return "n/a" if value is None else format(value / scale, pattern)


def heat_map(scores: dict[tuple[float, int], float]) -> str:
    """SVG of mean scores; columns are lengths, rows depths, an unmeasured cell is left blank."""
    depths, lengths = sorted({depth for depth, _ in scores}), sorted({length for _, length in scores})
    left, top, width, height = 80, 4, max(46, min(110, 220 // len(lengths))), 30
    right, bottom = left + width * len(lengths), top + height * len(depths)
    box = f'width="{width - 2}" height="{height - 2}" rx="3" stroke="#c8d3dd" stroke-width=".6"'
    parts = []
    for row, depth in enumerate(depths):
        y = top + row * height
        parts.append(f'<text x="{left - 8}" y="{y + 19}" style="text-anchor:end">{depth:g} %</text>')
        for column, length in enumerate(lengths):
            x, score = left + column * width, scores.get((depth, length))
            if score is None:
                parts.append(f'<rect x="{x}" y="{y}" {box} fill="none"/>')
                continue
            fill, ink = _colour(score)
            parts.append(
                f'<rect x="{x}" y="{y}" {box} fill="{fill}">'
                f"<title>length {length}, depth {depth:g} %: {score:.2f}</title></rect>"
                f'<text x="{x + width / 2 - 1:g}" y="{y + 19}" style="fill:{ink}">{score:.2f}</text>'
            )
    for column, length in enumerate(lengths):
        parts.append(f'<text x="{left + column * width + width / 2 - 1:g}" y="{bottom + 16}">{length}</text>')
    parts.append(f'<text x="{max((left + right) / 2, left + 70):g}" y="{bottom + 35}">prompt length (tokens)</text>')
    parts.append(f'<text transform="translate(12 {(top + bottom) / 2:g}) rotate(-90)">depth</text>')
    total_width, total_height = max(right, left + 140) + 6, bottom + 42
    return (
        f'<svg role="img" aria-label="score by depth and length" width="{total_width}" height="{total_height}" '
        f'viewBox="0 0 {total_width} {total_height}">{"".join(parts)}</svg>'
    )


def _legend() -> str:
    stops = "".join(f'<stop offset="{at}" stop-color="{_colour(at)[0]}"/>' for at, _ in _RAMP)
    return (
        '<svg role="img" aria-label="colour scale from 0 to 1" width="260" height="40" viewBox="0 0 260 40">'
        f'<defs><linearGradient id="ramp">{stops}</linearGradient></defs>'
        '<rect x="8" y="2" width="240" height="14" rx="3" fill="url(#ramp)" stroke="#c8d3dd" stroke-width=".6"/>'
        '<text x="26" y="33">0 lost</text><text x="212" y="33">1 recovered</text></svg>'
    )


_COLUMNS = (
    ("method", "the recipe, in full"),
    ("items", "items that ran"),
    ("score", "share of the answer recovered, mean"),
    ("exact", "share of items answered whole"),
    ("stored MiB", "bytes of the cache after the prompt, mean"),
    ("of full", "stored bytes as a share of those of the full cache"),
    ("kept rows", "rows kept per KV head and layer after the prompt, mean"),
    ("kept share", "kept rows as a share of the prompt's tokens"),
    ("ms / token", "decode time, median"),
    ("first token s", "time to the first token, prefill included, median"),
)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = "".join(f'<th scope="col" title="{escape(title)}">{escape(name)}</th>' for name, title in _COLUMNS)
    body = []
    for row in rows:
        score = row["score"] or 0.0
        of_full = (
            row["stored_bytes"] / row["full_bytes"] if row["stored_bytes"] is not None and row["full_bytes"] else None
        )
        failed = f" (+{row['failed']} failed)" if row["failed"] else ""
        body.append(
            f"<tr><td><code>{_breakable(row['method'])}</code></td><td>{row['items']}{failed}</td>"
            f'<td>{_number(row["score"], ".2f")}<span class="bar"><i style="width:{score:.0%}"></i></span></td>'
            f"<td>{_number(row['exact'], '.2f')}</td><td>{_number(row['stored_bytes'], '.2f', MIB)}</td>"
            f"<td>{_number(of_full, '.1%')}</td>"
            f"<td>{_number(row['kept_rows'], '.0f')}</td><td>{_number(row['kept_share'], '.1%')}</td>"
            f"<td>{_number(row['ms_per_token'], '.1f')}</td><td>{_number(row['ttft_seconds'], '.2f')}</td></tr>"
        )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _breakable(spec: str) -> str:
    """A spec that a narrow column breaks before its parameters and pieces, not inside a word."""
    return escape(spec).replace("(", "(<wbr>").replace("+", "<wbr>+")


def _notes(rows: Sequence[dict[str, Any]]) -> str:
    notes = [f"<li><code>{escape(row['method'])}</code>: {escape(note)}</li>" for row in rows for note in row["notes"]]
    return (
        f'<p class="quiet">What the methods say of themselves:</p><ul class="quiet">{"".join(notes)}</ul>'
        if notes
        else ""
    )


def _failures(lines: Sequence[Line]) -> str:
    failed = [line for line in lines if line.get("error")]
    if not failed:
        return ""
    shown = "".join(
        f"<li><code>{escape(line['method'])}</code>, {escape(line['item'])}: {escape(line['error'])}</li>"
        for line in failed[:10]
    )
    return f'<div class="warn"><p>Failed items, in no average: {len(failed)}.</p><ul>{shown}</ul></div>'


def render_report(lines: Sequence[Line]) -> str:
    """The whole page; needs nothing but the lines of results.jsonl."""
    sections = []
    for (task,), group in group_by(lines, "task").items():
        rows = summarise(group)
        sections.append(f"<h2>{escape(task)}</h2>{_table(rows)}{_notes(rows)}")
        maps = [
            f"<figure><figcaption><code>{escape(method)}</code></figcaption>{heat_map(scores)}</figure>"
            for (method,), of_method in group_by(group, "method").items()
            if (scores := grid(of_method))
        ]
        if maps:
            sections.append(f'<h2>Score by length and depth</h2>{_legend()}<div class="maps">{"".join(maps)}</div>')
    items = len({(line["task"], line["item"]) for line in lines})
    prompts = (
        "Every method was given the same prompt token ids."
        if shared_prompts(lines)
        else "<strong>Not every method was given the same prompt token ids: do not compare them.</strong>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kvfoundry report</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>kvfoundry: what each method keeps, and what it costs</h1><p class="quiet">{items} items, '
        f"{len({line['method'] for line in lines})} methods. {prompts} "
        "Score is the share of the answer recovered; exact counts whole answers.</p>"
        f"{_failures(lines)}{''.join(sections)}</main></body></html>\n"
    )
