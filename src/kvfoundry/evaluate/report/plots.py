"""The drawings of the report as SVG texts: score against bytes, score over budgets, and heat maps."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from kvfoundry.evaluate.board import MIB, Row
from kvfoundry.evaluate.recipes import FULL, split_budget
from kvfoundry.evaluate.report.marks import RAMP, Mark, ramp_colour

Point = tuple[float, float]

# With more marks than this, only those of the front are named.
_MOST_NAMES = 12


@dataclass(frozen=True)
class _Frame:
    """A plot's size and the pixels around its axes; x and y map figures to pixels."""

    width: int
    height: int
    x: Callable[[float], float]
    y: Callable[[float], float]
    left: int = 46
    right: int = 14
    top: int = 26
    bottom: int = 46

    def wrap(self, label: str, parts: Sequence[str]) -> str:
        return (
            f'<svg role="img" aria-label="{escape(label)}" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}">{"".join(parts)}</svg>'
        )

    def axes(self, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[float], x_label: str) -> list[str]:
        foot, end = self.height - self.bottom, self.width - self.right
        parts = []
        for value in y_ticks:
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{self.left}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="end" x="{self.left - 7}" y="{y + 4:.1f}">{value:g}</text>')
        for value, text in x_ticks:
            x = self.x(value)
            parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{foot}" y2="{foot + 5}"/>')
            parts.append(f'<text x="{x:.1f}" y="{foot + 19}">{text}</text>')
        parts.append(f'<line class="axis" x1="{self.left}" x2="{end}" y1="{foot}" y2="{foot}"/>')
        parts.append(f'<text x="{(self.left + end) / 2:.1f}" y="{self.height - 6}">{escape(x_label)}</text>')
        middle = (self.top + foot) / 2
        parts.append(f'<text transform="translate(11 {middle:.1f}) rotate(-90)">score</text>')
        return parts


def _frame(width: int, height: int, low: float, high: float, top_score: float) -> _Frame:
    """A frame with a logarithmic x axis from low to high and a score axis from 0 to top_score."""
    left, right, top, bottom = _Frame.left, _Frame.right, _Frame.top, _Frame.bottom
    span = math.log(high / low)

    def x(value: float) -> float:
        return left + 12 + (width - left - right - 24) * math.log(value / low) / span

    def y(value: float) -> float:
        return height - bottom - (height - top - bottom) * value / top_score

    return _Frame(width, height, x, y)


def _score_ticks(highest: float) -> list[float]:
    """Ticks from 0 to a round number that the highest score does not pass."""
    if highest > 0.8:
        return [0.0, 0.25, 0.5, 0.75, 1.0]
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2) if 5 * step >= highest)
    return [round(step * number, 2) for number in range(max(1, math.ceil(highest / step - 1e-9)) + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers inside the range, as many as there is room for."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    fine = [number / 10 for number in range(10, 100)]
    for steps in (fine, range(1, 10), (1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            return ticks
    return ticks[:: math.ceil(len(ticks) / most)]


def pareto_plot(rows: Sequence[Row], marks: Mapping[str, Mark], width: int) -> str:
    """Score against stored bytes per prompt, one mark per method; the front filled and joined by a staircase."""
    measured = [row for row in rows if row["score"] is not None and row["stored_bytes"]]
    if not measured:
        return ""
    sizes = [row["stored_bytes"] / MIB for row in measured]
    low, high = min(sizes) / 1.25, max(sizes) * 1.25
    ticks = _score_ticks(max(row["score"] for row in measured))
    frame = _frame(width, 380 if width > 500 else 320, low, high, ticks[-1])
    parts = frame.axes(
        [(tick, f"{tick:g}") for tick in _log_ticks(low, high, 8 if width > 500 else 5)],
        ticks,
        "stored per prompt (MiB, logarithmic)",
    )
    front = sorted((row for row in measured if row["front"]), key=lambda row: (row["stored_bytes"], -row["score"]))
    stairs = [(frame.x(row["stored_bytes"] / MIB), frame.y(row["score"])) for row in front]
    path = "".join(f" H{x:.1f} V{y:.1f}" for x, y in stairs[1:])
    for x, y in stairs[:1]:
        parts.append(f'<path class="front" d="M{x:.1f} {y:.1f}{path} H{frame.width - frame.right}"/>')
    labels = _Labels(frame.width - frame.right, frame.height - frame.bottom)
    places = [
        (row, frame.x(row["stored_bytes"] / MIB), frame.y(row["score"]))
        for row in sorted(measured, key=lambda row: row["front"])
    ]
    for _, x, y in places:
        labels.block(x, y)
    for row, x, y in places:
        family, _ = split_budget(row["method"])
        title = f"{row['method']}: score {row['score']:.3f}, {row['stored_bytes'] / MIB:.2f} MiB"
        parts.append(marks[family].svg(x, y, 5.5 if row["front"] else 4.5, filled=row["front"], title=escape(title)))
    for row, x, y in reversed(places):  # the front first: it has the first choice of room
        if not row["front"] and len(places) > _MOST_NAMES:
            continue  # in a crowd a name does not tell which mark it means
        parts.append(labels.place(x, y, _short(row["method"]), "name" if row["front"] else "other"))
    return frame.wrap("score against stored bytes of every method; the front is listed in the board", parts)


def _short(spec: str) -> str:
    """A name for a label: the pieces without their parameters, and the budget."""
    family, budget = split_budget(spec)
    names = "+".join(piece.partition("(")[0] for piece in family.split("+"))
    return names if budget is None else f"{names} {budget:g}"


class _Labels:
    """Puts texts beside their points where nothing else stands; a text without room is left out."""

    def __init__(self, right: float, foot: float) -> None:
        self.right, self.foot = right, foot
        self.taken: list[tuple[float, float, float, float]] = []

    def block(self, x: float, y: float) -> None:
        self.taken.append((x - 6, y - 6, x + 6, y + 6))

    def place(self, x: float, y: float, text: str, look: str) -> str:
        width, height = 6.6 * len(text), 13
        for dx, dy, anchor in (
            (8, -8, "start"), (-8, -8, "end"), (8, 18, "start"), (-8, 18, "end"), (-11, 4, "end"), (11, 4, "start"),
        ):  # fmt: skip
            left = x + dx if anchor == "start" else x + dx - width
            box = (left, y + dy - height + 3, left + width, y + dy + 3)
            inside = box[0] > _Frame.left and box[2] < self.right and box[1] > 0 and box[3] < self.foot
            if inside and not any(_overlap(box, other) for other in self.taken):
                self.taken.append(box)
                return f'<text class="{look} {anchor}" x="{x + dx:.1f}" y="{y + dy:.1f}">{escape(text)}</text>'
        return ""


def _overlap(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    return first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3]


def curves(
    series: Mapping[str, Sequence[Point]], full: float | None, marks: Mapping[str, Mark], *, shares: bool
) -> str:
    """Score over the budget on one task, a line per recipe; the full cache's score is a dashed line.

    series: recipe -> (budget, score), at least one point in all. shares: budgets are kept shares, not rows.
    """
    budgets = sorted({budget for points in series.values() for budget, _ in points})
    highest = max([score for points in series.values() for _, score in points] + ([full] if full is not None else []))
    low, high = budgets[0], budgets[-1]
    if low == high:
        low, high = low / 2, high * 2
    ticks = _score_ticks(highest)
    frame = _frame(326, 232, low, high, ticks[-1])
    named = budgets if len(budgets) <= 6 else _log_ticks(low, high, 5)
    x_ticks = [(value, f"{value:.0%}" if shares else f"{value:g}") for value in named]
    parts = frame.axes(x_ticks, ticks, "budget (kept share)" if shares else "budget (rows per head and layer)")
    if full is not None:
        y = frame.y(full)
        parts.append(
            f'<line class="full" x1="{frame.left}" x2="{frame.width - frame.right}" y1="{y:.1f}" y2="{y:.1f}">'
            f"<title>{FULL}: {full:.3f}</title></line>"
        )
    for family, points in series.items():
        places = [(frame.x(budget), frame.y(score)) for budget, score in sorted(points)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{marks[family].colour}" stroke-width="1.8"/>')
        for (budget, score), (x, y) in zip(sorted(points), places, strict=True):
            title = f"{family}, budget {budget:g}: {score:.3f}"
            parts.append(marks[family].svg(x, y, 4, title=escape(title)))
    return frame.wrap("score over the budget, a line per recipe", parts)


def heat_map(scores: Mapping[tuple[float, int], float]) -> str:
    """Mean scores; columns are lengths, rows depths, an unmeasured cell is left blank.

    scores: (depth in per cent, length in tokens) -> mean score.
    """
    depths, lengths = sorted({depth for depth, _ in scores}), sorted({length for _, length in scores})
    left, top, width, height = 80, 4, max(46, min(110, 220 // len(lengths))), 30
    right, bottom = left + width * len(lengths), top + height * len(depths)
    box = f'width="{width - 2}" height="{height - 2}" rx="3" stroke="#c8d3dd" stroke-width=".6"'
    parts = []
    for row, depth in enumerate(depths):
        y = top + row * height
        parts.append(f'<text class="end" x="{left - 8}" y="{y + 19}">{depth:g} %</text>')
        for column, length in enumerate(lengths):
            x, score = left + column * width, scores.get((depth, length))
            if score is None:
                parts.append(f'<rect x="{x}" y="{y}" {box} fill="none"/>')
                continue
            fill, ink = ramp_colour(score)
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


def ramp_legend() -> str:
    """The colour scale of the heat maps."""
    stops = "".join(f'<stop offset="{at}" stop-color="{ramp_colour(at)[0]}"/>' for at, _ in RAMP)
    return (
        '<svg role="img" aria-label="colour scale from 0 to 1" width="260" height="40" viewBox="0 0 260 40">'
        f'<defs><linearGradient id="ramp">{stops}</linearGradient></defs>'
        '<rect x="8" y="2" width="240" height="14" rx="3" fill="url(#ramp)" stroke="#c8d3dd" stroke-width=".6"/>'
        '<text class="start" x="8" y="33">0 lost</text><text class="end" x="248" y="33">1 recovered</text></svg>'
    )
