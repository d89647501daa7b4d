"""How long the passages of a dataset are, in the model's own tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvfoundry.analysis.results import COLOURS, new_figure, saved
from kvfoundry.evaluate.tasks.ragqa_data import RagData

_PERCENTILES = (5, 25, 50, 75, 90, 95, 99)


def passages(tokenizer: Any, data: RagData, folder: Path, about: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Write passages.json and passages.png; the figures and the paths.

    Tokens of title and text of every different passage, and of all passages of a sample together.
    """
    texts = list(dict.fromkeys(f"{p.title}: {p.text}" if p.title else p.text for s in data.samples for p in s.passages))
    size_of = {text: len(ids) for text, ids in zip(texts, _encoded(tokenizer, texts), strict=True)}
    lengths = np.array(list(size_of.values()))
    totals = np.array(
        [sum(size_of[f"{p.title}: {p.text}" if p.title else p.text] for p in s.passages) for s in data.samples]
    )
    told = {
        "about": about,
        "samples": len(data.samples),
        "different_passages": len(texts),
        "passages_per_sample": round(sum(len(s.passages) for s in data.samples) / len(data.samples), 2),
        "passage_tokens": _described(lengths),
        "sample_tokens": _described(totals),
        "lengths": lengths.tolist(),
    }
    figure = new_figure(10, 4, f"Lengths in tokens of {about['model']}: {about['data']}")
    for axis, values, what, colour in zip(
        figure.subplots(1, 2), (lengths, totals), ("passages", "samples"), COLOURS, strict=False
    ):
        axis.hist(values, bins=min(40, max(8, len(set(values.tolist())))), color=colour, alpha=0.8)
        for q, style in ((50, "-"), (95, "--")):
            at = float(np.percentile(values, q))
            axis.axvline(at, color="#333", linestyle=style, linewidth=1, label=f"{q} % are within {at:,.0f}")
        of_what = "a passage" if what == "passages" else "all passages of a sample"
        axis.set(xlabel=f"tokens of {of_what}", ylabel=f"number of {what}")
        axis.legend(fontsize=8)
    return told, saved(folder, "passages", told, figure)


def _encoded(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    found: list[list[int]] = tokenizer(texts, add_special_tokens=False).input_ids
    return found


def _described(values: Any) -> dict[str, float]:
    spread = {f"p{q}": round(float(np.percentile(values, q)), 1) for q in _PERCENTILES}
    return {"least": int(values.min()), "mean": round(float(values.mean()), 1), "most": int(values.max()), **spread}
