"""The picture of a benchmark: times of steps and first tokens, bytes for every batch, and the rates below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvfoundry.analysis.results import COLOURS, new_figure
from kvfoundry.bench.latency import OWN
from kvfoundry.bench.numbers import short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Figures = Sequence[dict[str, Any]]
_MIB = 2**20
_MARKERS = {"plain": "o", "engine": "s", "compiled": "D", "eager": "x", "static": "+"}
_THEIRS = "#404040"
# Inches of a row of panels, of the one with the rates, and of what stands above and below.
_ROW, _RATES, _REST = 3.3, 1.5, 1.3
_RATE_NAMES = {
    "copy": "copy on the device (read + write)",
    "host_to_device": "pinned host to device",
    "device_to_host": "device to pinned host",
    "disk_write": "disk: write and flush",
    "disk_read": "disk: read",
    "disk_read_from_memory": "disk: read (from the system's memory)",
}


def picture(content: dict[str, Any], title: str) -> Figure:
    """Draw what a record holds (`Record.content`). Raises MissingExtraError without matplotlib."""
    figures: Figures = content["figures"]
    batches = sorted({figure["batch"] for figure in figures}) or [1]
    figure = new_figure(13, _ROW * len(batches) + _RATES + _REST, title)
    axes = figure.subplots(
        len(batches) + 1, 3, squeeze=False, height_ratios=[_ROW] * len(batches) + [_RATES],
    )  # fmt: skip
    colours = _colours(figures)
    for row, batch in zip(axes, batches, strict=False):
        _panels(row, [each for each in figures if each["batch"] == batch], batch, colours)
    for axis in axes[-1]:
        axis.remove()
    _rates(figure.add_subplot(axes[-1, 0].get_gridspec()[-1, :]), content["rates"])
    figure.legend(handles=_legend(figures, colours), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _colours(figures: Figures) -> dict[str, str]:
    methods = list(dict.fromkeys(each["method"] for each in figures if each["arm"] not in OWN))
    return {method: COLOURS[number % len(COLOURS)] for number, method in enumerate(methods)}


def _look(each: dict[str, Any], colours: dict[str, str]) -> dict[str, Any]:
    return {
        "color": _THEIRS if each["arm"] in OWN else colours[each["method"]],
        "marker": _MARKERS[each["arm"]],
        "markersize": 6,
    }


def _panels(row: Any, figures: Figures, batch: int, colours: dict[str, str]) -> None:
    contexts = sorted({each["tokens"] for each in figures})
    series = list(dict.fromkeys((each["method"], each["arm"]) for each in figures))
    series.sort(key=lambda one: (one[1] not in OWN, list(colours).index(one[0]) if one[1] not in OWN else 0))
    step = 0.8 / max(len(series), 1)

    def place(each: dict[str, Any]) -> float:
        number = series.index((each["method"], each["arm"]))
        return contexts.index(each["tokens"]) + (number - (len(series) - 1) / 2) * step

    steps, first, size = row
    _times(steps, figures, place, step, colours, "ms", "roofline_ms")
    _times(first, figures, place, step, colours, "ttft_ms", "ttft_roofline_ms")
    for each in figures:
        look, at = _look(each, colours), place(each)
        stored, peak = each["stored_bytes"] / _MIB, each["peak_bytes"] / _MIB
        size.plot([at, at], [stored, peak], color=look["color"], linewidth=1)
        size.plot(at, stored, linestyle="", **look)
        size.plot(at, peak, linestyle="", color=look["color"], marker="v", markersize=5, markerfacecolor="white")
        _tick(size, at, each["full_bytes"] / _MIB, step, _THEIRS)
    labels = {steps: "ms per decode step", first: "ms to the first token", size: "MiB: stored, and peak (triangle)"}
    for axis, label in labels.items():
        axis.set_yscale("log")
        axis.set(ylabel=f"{label} (log)", xlabel=f"tokens of context, batch of {batch}")
        axis.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
        axis.set_xlim(-0.6, len(contexts) - 0.4)
        for between in range(1, len(contexts)):
            axis.axvline(between - 0.5, color="#dddddd", linewidth=0.8)
        axis.grid(axis="y", color="#eeeeee")
        axis.set_axisbelow(True)
        _plain_numbers(axis)


def _times(
    axis: Any, figures: Figures, place: Callable[[dict[str, Any]], float], step: float, colours: dict[str, str],
    time: str, roofline: str,
) -> None:  # fmt: skip
    for each in figures:
        if each[time] is None:  # no prompt was read
            continue
        look = _look(each, colours)
        axis.plot(place(each), each[time], linestyle="", **look)
        _tick(axis, place(each), each[roofline], step, look["color"])


def _tick(axis: Any, at: float, value: float, step: float, colour: str) -> None:
    axis.plot([at - step * 0.42, at + step * 0.42], [value, value], color=colour, linewidth=1.8, alpha=0.7)


def _plain_numbers(axis: Any) -> None:
    """1, 2, 5, 10 ... instead of powers, and a range that holds at least two of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_ylim()
    if high / low < 6:
        middle = (high * low) ** 0.5
        axis.set_ylim(middle / 6**0.5, middle * 6**0.5)
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _rates(axis: Any, rates: dict[str, float]) -> None:
    found = {label: rates.get(f"{name}_bytes_per_s") for name, label in _RATE_NAMES.items()}
    shown = {label: rate / 1e9 for label, rate in found.items() if rate is not None}
    axis.barh(range(len(shown)), list(shown.values()), color="#9ecae1")
    for number, (label, rate) in enumerate(shown.items()):
        axis.text(rate, number, f" {label}: {short(rate)} GB/s", va="center", fontsize=8)
    axis.set_yticks([])
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(min(0.1, *shown.values()) / 2, max(shown.values()) * 50)
    axis.set_xlabel("GB per second (log)", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)


def _legend(figures: Figures, colours: dict[str, str]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, linewidth=5, label=method) for method, colour in colours.items()]
    for arm in dict.fromkeys(each["arm"] for each in figures):
        name = f"transformers, {arm}" if arm in OWN else f"kvfoundry, {arm}"
        handles.append(Line2D([], [], color=_THEIRS, marker=_MARKERS[arm], linestyle="", label=name))
    tick = "dash: roofline of times, full cache of bytes"
    return [*handles, Line2D([], [], color=_THEIRS, linewidth=1.8, alpha=0.7, label=tick)]
