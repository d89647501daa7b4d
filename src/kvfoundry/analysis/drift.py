"""Coherence and drift: how alike the attention of neighbouring steps is, and how far it has moved from the first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfoundry.analysis.results import COLOURS, heat_map, new_figure, numbers, padded_mean, saved
from kvfoundry.analysis.traces import Trace
from kvfoundry.errors import DataError


def drift(traces: Sequence[Trace], folder: Path, about: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Write drift.json and drift.png; the figures and the paths.

    local: cosine between the attention over the tokens of the passages in a step and in the one before; to_first: in a
    step and in the first one. [steps - 1, layers], from the second step on, mean over heads and over the samples that
    have the step. Raises DataError when every answer is one token long.
    """
    long = [trace for trace in traces if len(trace.tokens) > 1]
    if not long:
        raise DataError("every answer is one token long, so there are no steps to compare; give more --steps.")
    local, first = padded_mean([t.to_previous for t in long]), padded_mean([t.to_first for t in long])
    layers = long[0].layers
    data = {
        "about": about,
        "layers": list(layers),
        "local": {"mean": round(float(local.mean()), 4), "by_step_and_layer": numbers(local, 4)},
        "to_first": {"mean": round(float(first.mean()), 4), "by_step_and_layer": numbers(first, 4)},
    }
    figure = new_figure(10, 4.4, f"Attention to the passages over time: {about['model']}")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    steps = range(2, len(local) + 2)
    for values, colour, label in ((local, COLOURS[0], "to the step before"), (first, COLOURS[4], "to the first step")):
        left.plot(steps, values.mean(dim=1), color=colour, marker=".", label=label)
        left.fill_between(steps, values.amin(dim=1), values.amax(dim=1), color=colour, alpha=0.12)
    left.set(xlabel="decode step", ylabel="cosine similarity (line: mean, band: all layers)", ylim=(0, 1.02))
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(fontsize=8, loc="lower left")
    rows, columns = [str(i) for i in layers], [str(i) for i in steps]
    image = heat_map(right, first.T, rows=rows, columns=columns, vmin=0, vmax=1)
    right.set(xlabel="decode step", ylabel="layer")
    figure.colorbar(image, ax=right, label="similarity to the first step")
    return data, saved(folder, "drift", data, figure)
