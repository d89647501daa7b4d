"""Chunk coverage: how many chunks hold a share of the attention that goes to the passages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvfoundry.analysis.results import COLOURS, new_figure, numbers, saved
from kvfoundry.analysis.traces import Trace

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)


def coverage(traces: Sequence[Trace], folder: Path, about: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Write coverage.json and coverage.png; the figures and the paths.

    For every decode step and layer the chunks are taken in the order of their attention. curve[k]: attention held by
    the best k chunks, mean over steps, layers and samples (those with fewer chunks hold everything by then). needed:
    share -> mean number of chunks that hold it, and per layer.
    """
    widest = max(len(trace.prompt.chunks) for trace in traces)
    held = [trace.chunk_shares.sort(dim=-1, descending=True).values.cumsum(dim=-1) for trace in traces]
    wide = [torch.nn.functional.pad(each, (0, widest - each.shape[-1]), value=1.0) for each in held]
    every = torch.cat(wide)  # [steps of all samples, layers, chunks]
    curve = torch.cat([torch.zeros(1), every.mean(dim=(0, 1))])
    low, high = (torch.cat([torch.zeros(1), every.mean(dim=1).quantile(q, dim=0)]) for q in (0.1, 0.9))
    needed = {share: (every < share - 1e-6).sum(dim=-1).float() + 1 for share in SHARES}
    layers = traces[0].layers
    data = {
        "about": about,
        "chunks": {"mean": sum(len(trace.prompt.chunks) for trace in traces) / len(traces), "most": widest},
        "curve": numbers(curve),
        "curve_p10": numbers(low),
        "curve_p90": numbers(high),
        "needed": {f"{share:g}": round(float(counts.mean()), 3) for share, counts in needed.items()},
        "needed_by_layer": {f"{share:g}": numbers(counts.mean(dim=0), 3) for share, counts in needed.items()},
        "layers": list(layers),
    }
    figure = new_figure(10, 4.2, f"How many chunks hold the attention to the passages: {about['model']}")
    left, right = figure.subplots(1, 2)
    left.fill_between(range(widest + 1), low, high, color=COLOURS[0], alpha=0.2, label="10 to 90 % of the steps")
    left.plot(range(widest + 1), curve, color=COLOURS[0], marker="o", markersize=3, label="mean over steps and layers")
    for share in (0.9, 0.99):
        left.axhline(share, color="#888", linewidth=0.8, linestyle=":")
        left.text(widest, share - 0.01, f"{share:.0%}", ha="right", va="top", fontsize=8, color="#555")
    left.set(
        xlabel="chunks, those with most attention first", ylabel="share of the attention to passages", ylim=(0, 1.02)
    )
    left.set_xlim(0, widest)
    left.legend(fontsize=8, loc="lower right")
    for colour, share in zip(COLOURS, (0.5, 0.8, 0.9, 0.95), strict=False):
        right.plot(layers, needed[share].mean(dim=0), color=colour, marker=".", label=f"{share:.0%}")
    right.set(xlabel="layer", ylabel="chunks needed (mean over steps)", ylim=(0, widest + 0.5))
    right.legend(fontsize=8, title="share held", title_fontsize=8, ncols=2)
    return data, saved(folder, "coverage", data, figure)
