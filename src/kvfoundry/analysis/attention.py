"""Attention maps: how the attention of every decode step and layer falls on the passages of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfoundry.analysis.attention_page import render
from kvfoundry.analysis.results import heat_map, new_figure, numbers, saved, short
from kvfoundry.analysis.traces import Trace

ANSWER = "answer so far"
# Samples in the picture; the page and the JSON have all.
_PICTURED = 3


def attention(
    traces: Sequence[Trace], texts: dict[str, dict[str, str]], folder: Path, about: dict[str, Any]
) -> tuple[dict[str, Any], list[Path]]:
    """Write attention.json, attention.png and attention.html; the figures and the paths.

    Of every sample: mass by step and part (mean over layers) and by layer and part (mean over steps), and in full,
    [steps, layers, parts]; the last part is the answer itself. texts: sample -> part -> its text, for the page.
    """
    samples = []
    for trace in traces:
        parts = [
            *({"name": p.name, "kind": p.kind, "tokens": p.stop - p.start, "gold": p.gold} for p in trace.prompt.parts)
        ]
        parts.append({"name": ANSWER, "kind": "answer", "tokens": len(trace.tokens), "gold": None})
        samples.append(
            {
                "item": trace.prompt.item,
                "question": trace.prompt.question,
                "answer": "".join(trace.tokens),
                "tokens": list(trace.tokens),
                "layers": list(trace.layers),
                "parts": parts,
                "mass": numbers(trace.mass, 4),
                "by_step": numbers(trace.mass.mean(dim=1), 4),
                "by_layer": numbers(trace.mass.mean(dim=0), 4),
            }
        )
    data = {"about": about, "samples": samples}
    paths = saved(folder, "attention", data, _picture(traces[:_PICTURED], about))
    page = folder / "attention.html"
    shown = [dict(sample, texts=texts.get(str(sample["item"]), {})) for sample in samples]
    page.write_text(render(f"Attention over passages: {about['model']}", about, shown), encoding="utf-8")
    return data, [*paths, page]


def _picture(traces: Sequence[Trace], about: dict[str, Any]) -> Any:
    most = max(len(trace.prompt.parts) for trace in traces)
    height = max(2.8, 0.19 * most + 1.6)
    figure = new_figure(12, height * len(traces) + 0.4, f"Attention over passages: {about['model']}")
    for axes, trace in zip(figure.subplots(len(traces), 2, squeeze=False), traces, strict=True):
        names = [("★ " if part.gold else "") + short(part.name) for part in trace.prompt.parts] + [ANSWER]
        tokens = [short(token.strip() or "␣", 12) for token in trace.tokens]
        layers = [str(layer) for layer in trace.layers]
        shown = ((trace.mass.mean(dim=1), tokens, "token being written"), (trace.mass.mean(dim=0), layers, "layer"))
        # The first tokens draw most of the attention whatever they say; the scale is that of the passages.
        top = max(float(values[:, trace.prompt.chunks].max()) for values, _, _ in shown)
        image: Any = None
        for axis, (values, columns, label) in zip(axes, shown, strict=True):
            image = heat_map(axis, values.T, rows=names, columns=columns, vmin=0, vmax=top, cmap="viridis")
            axis.set_xlabel(f"{label} (mean over {'layers' if columns is tokens else 'steps'})", fontsize=8)
        axes[1].set_yticklabels([])
        axes[0].set_title(short(f"{trace.prompt.item}: {trace.prompt.question}", 80), fontsize=9, loc="left")
        axes[1].set_title("★ passages that the answer needs", fontsize=8, loc="right", color="#555")
        figure.colorbar(image, ax=list(axes), label="share of the attention", extend="max", pad=0.01)
    return figure
