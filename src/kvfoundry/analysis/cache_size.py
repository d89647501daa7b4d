"""Theoretical cache sizes: bytes of a full cache against the length of the text, for models, dtypes and cards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvfoundry.analysis.results import COLOURS, new_figure, saved
from kvfoundry.errors import DataError
from kvfoundry.feeding import position_limit
from kvfoundry.method import Method
from kvfoundry.planning import Memory, Meter
from kvfoundry.planning.known import KNOWN, known_or_loaded
from kvfoundry.planning.plan import DTYPES

GIB = 2**30
DEFAULT_MODELS = ("smollm2", *KNOWN)
_LENGTHS = [2**power for power in range(9, 21)]


def cache_size(
    models: Sequence[str],
    dtypes: Sequence[str],
    cards: Sequence[Memory],
    folder: Path,
    *,
    batch: int = 1,
    method: str = "fullkv",
) -> tuple[dict[str, Any], list[Path]]:
    """Write cache-size.json and cache-size.png; the figures and the paths.

    Of every model and dtype: bytes of `batch` caches at lengths up to its positions, of its weights, and for every card
    the longest of these lengths, and sequences at 8,192 tokens, that fit beside them. Raises KVFoundryError.
    """
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise DataError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    lines = [_line(name, known_or_loaded(name), dtype, cards, batch, method) for name in models for dtype in dtypes]
    data = {
        "about": {
            "method": str(Method.parse(method)),
            "batch": batch,
            "cards": {card.name: card.nbytes for card in cards},
        },
        "models": lines,
    }
    return data, saved(folder, "cache-size", data, _picture(data, lines, cards))


def _line(
    name: str, model: PreTrainedModel, dtype: str, cards: Sequence[Memory], batch: int, method: str
) -> dict[str, Any]:
    numbers = DTYPES[dtype]
    meter, limit = Meter(model, method, numbers), position_limit(model)
    lengths = [length for length in _LENGTHS if limit is None or length < limit] + ([] if limit is None else [limit])
    sizes = {length: meter.size(length).stored * batch for length in lengths}
    weights = sum(parameter.numel() for parameter in model.parameters()) * numbers.itemsize
    usual = min(8192, lengths[-1])
    fit = {
        card.name: {
            "longest_tokens": max((n for n, size in sizes.items() if weights + size <= card.nbytes), default=0),
            f"sequences_of_{usual}": max(0, (card.nbytes - weights) // meter.size(usual).stored),
        }
        for card in cards
    }
    return {
        "model": name,
        "dtype": dtype,
        "weight_bytes": weights,
        "bytes_per_token": round(sizes[usual] / usual / batch, 1),
        "cache_bytes": {str(length): size for length, size in sizes.items()},
        "beside_the_weights": fit,
    }


def _picture(data: dict[str, Any], lines: Sequence[dict[str, Any]], cards: Sequence[Memory]) -> Any:
    title = f"Size of the cache ({data['about']['method']}), batch of {data['about']['batch']}, without the weights"
    figure = new_figure(10, 5.6, title)
    axis = figure.subplots()
    names, styles = list(dict.fromkeys(line["model"] for line in lines)), ("-", "--", ":")
    dtypes = list(dict.fromkeys(line["dtype"] for line in lines))
    for line in lines:
        lengths = [int(length) for length in line["cache_bytes"]]
        label = line["model"] if len(dtypes) == 1 else f"{line['model']}, {line['dtype']}"
        look: dict[str, Any] = {
            "color": COLOURS[names.index(line["model"]) % len(COLOURS)],
            "linestyle": styles[dtypes.index(line["dtype"])],
        }
        sizes = [size / GIB for size in line["cache_bytes"].values()]
        axis.plot(
            lengths, sizes, marker=".", label=f"{label} ({line['bytes_per_token'] / 1024:,.0f} KiB per token)", **look
        )
    left = min(int(length) for line in lines for length in line["cache_bytes"])
    for card in cards:
        axis.axhline(card.nbytes / GIB, color="#666", linewidth=0.9, linestyle=(0, (4, 3)))
        axis.text(left, card.nbytes / GIB * 1.05, f"memory of {card.name}", fontsize=8, color="#444")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted(
        {int(length) for line in lines for length in line["cache_bytes"] if int(length) & (int(length) - 1) == 0}
    )
    axis.set_xticks(ticks, [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set(xlabel="tokens of a sequence", ylabel=f"cache (GiB), {dtypes[0] if len(dtypes) == 1 else 'by dtype'}")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="lower right")
    return figure
