"""Chunk sparsity: how many chunks a decode step leaves nearly unread, from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from kvfoundry.analysis.results import COLOURS, heat_map, new_figure, numbers, padded_mean, saved
from kvfoundry.analysis.traces import Trace


def effective(shares: Tensor) -> Tensor:
    """Chunks that are read as if evenly: the exponential of the entropy of shares [..., chunks]; 1 to their number."""
    return (-(shares * shares.clamp(min=1e-12).log()).sum(dim=-1)).exp()


def sparsity(
    traces: Sequence[Trace], folder: Path, about: dict[str, Any], threshold: float = 0.5
) -> tuple[dict[str, Any], list[Path]]:
    """Write sparsity.json and sparsity.png; the figures and the paths.

    A chunk is idle in a step and layer when it gets less than `threshold` times an even share of the attention to the
    passages. idle: share of idle chunks; effective: see `effective`, over the number of chunks. Both are [steps,
    layers], mean over the samples that have the step.
    """
    idle = padded_mean([(t.chunk_shares * len(t.prompt.chunks) < threshold).float().mean(dim=-1) for t in traces])
    read = padded_mean([effective(t.chunk_shares) / len(t.prompt.chunks) for t in traces])
    layers = traces[0].layers
    data = {
        "about": about | {"threshold": threshold},
        "layers": list(layers),
        "idle": {"mean": round(float(idle.mean()), 4), "by_step_and_layer": numbers(idle, 4)},
        "effective": {"mean": round(float(read.mean()), 4), "by_step_and_layer": numbers(read, 4)},
    }
    figure = new_figure(10, 4.4, f"How sparsely chunks are read while decoding: {about['model']}")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    steps = range(1, len(idle) + 1)
    for values, colour, label in (
        (idle, COLOURS[0], f"idle chunks (below {threshold:g} of an even share)"),
        (read, COLOURS[1], "chunks read as if evenly (effective)"),
    ):
        left.plot(steps, values.mean(dim=1), color=colour, marker=".", label=label)
    left.set(xlabel="decode step", ylabel="share of the chunks, mean over layers", ylim=(0, 1))
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(fontsize=8)
    image = heat_map(right, idle.T, rows=[str(i) for i in layers], columns=[str(i) for i in steps], vmin=0, vmax=1)
    right.set(xlabel="decode step", ylabel="layer")
    figure.colorbar(image, ax=right, label="share of idle chunks")
    return data, saved(folder, "sparsity", data, figure)
