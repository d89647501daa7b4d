"""A small measurement of chunks: bytes, and milliseconds to compute, store, fetch, promote and blend them."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvfoundry.analysis.prompts import check_any
from kvfoundry.analysis.results import COLOURS, new_figure, saved
from kvfoundry.chunks.identity import Identity
from kvfoundry.chunks.passage import read_passage
from kvfoundry.chunks.store import ChunkStore
from kvfoundry.devices import input_device
from kvfoundry.evaluate.tasks.ragqa_data import RagSample
from kvfoundry.generation import generate
from kvfoundry.method import Method
from kvfoundry.planning import Meter

OPERATIONS = {
    "compute": "read the passage",
    "put": "put: host and disk",
    "fetch_host": "get from host memory",
    "fetch_disk": "get from disk",
    "promote": "promote: disk to host",
    "to_cache": "cache over the chunk",
}


def cache_bench(
    model: PreTrainedModel,
    tokenizer: Any,
    samples: Sequence[RagSample],
    methods: Sequence[str],
    folder: Path,
    about: dict[str, Any],
    *,
    repeat: int = 3,
    blend: str = "blend(ratio=0.15)",
) -> tuple[dict[str, Any], list[Path]]:
    """Write cache-bench.json and cache-bench.png; the figures and the paths.

    Per method: bytes of a chunk as measured and as planned, and the median milliseconds of every operation over the
    passages and `repeat` rounds. Then the time to the first token of an answer over all passages of a sample: from
    their text, from stored chunks that are blended, and from chunks of which nothing is computed again.
    """
    check_any(samples, "the data holds none")
    passages = [f"{p.title}: {p.text}\n\n" for p in samples[0].passages]
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in passages]
    rows = [_chunks(model, tokenizer, ids, method, repeat) for method in methods]
    answers = _answers(model, tokenizer, samples[0], passages, blend, repeat)
    data = {
        "about": about | {"passages": len(passages), "tokens": [len(each) for each in ids], "repeat": repeat},
        "operations": OPERATIONS,
        "chunks": rows,
        "first_token": answers,
    }
    return data, saved(folder, "cache-bench", data, _picture(data, about))


def _timed(run: Callable[..., Any], device: torch.device, *given: Any) -> tuple[float, Any]:
    """Milliseconds of run(*given), and what came of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    found = run(*given)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - began), found


def _chunks(model: PreTrainedModel, tokenizer: Any, ids: list[list[int]], method: str, repeat: int) -> dict[str, Any]:
    device, identity = input_device(model), Identity.of(model, tokenizer, method)
    spent: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    nbytes: list[int] = []

    def timed(name: str, run: Callable[..., Any], *given: Any) -> Any:
        ms, found = _timed(run, device, *given)
        spent[name].append(ms)
        return found

    for _ in range(repeat):
        with tempfile.TemporaryDirectory(prefix="kvfoundry-") as room:
            tiers = f"host:4GiB,disk:{room}:4GiB"
            with ChunkStore(tiers) as store:
                for each in ids:
                    chunk = timed("compute", partial(read_passage, tokenizer=tokenizer), model, each, method)
                    nbytes.append(chunk.nbytes)
                    timed("put", store.put, identity.key(each), chunk)
                for each in ids:
                    chunk = timed("fetch_host", partial(store.get, device=device), identity.key(each))
                    timed("to_cache", chunk.to_cache, model)
            with ChunkStore(tiers) as cold:  # nothing of an earlier store is in its host memory
                for each in ids:
                    timed("fetch_disk", partial(cold.get, device=device), identity.key(each))
            with ChunkStore(tiers) as cold:
                for each in ids:
                    timed("promote", lambda key, store: store.promote(key).result(), identity.key(each), cold)
    meter = Meter(model, method, model.dtype)
    planned = sum(meter.chunk_bytes(len(each)) for each in ids) / len(ids)
    return {
        "method": str(Method.parse(method)),
        "chunk_bytes": round(statistics.mean(nbytes)),
        "planned_bytes": round(planned),
        "milliseconds": {name: round(statistics.median(values), 3) for name, values in spent.items()},
    }


def _answers(
    model: PreTrainedModel, tokenizer: Any, sample: RagSample, passages: list[str], blend: str, repeat: int
) -> list[dict[str, Any]]:
    """Milliseconds to the first token, and rows computed again, of one question over all passages."""
    question = f"Question: {sample.question}\nAnswer:"
    found = []
    with ChunkStore("host:4GiB") as store:
        for name, how in (("from text", None), (blend, blend), ("blend(ratio=0)", "blend(ratio=0.0)")):
            given: dict[str, Any] = {} if how is None else {"documents": passages, "store": store, "blend": how}
            prompt = "".join(passages) + question if how is None else question
            runs = []
            for number in range(repeat + 1):
                answers: Any = generate(model, tokenizer, [prompt], max_new_tokens=1, details=True, chat=False, **given)
                if number:  # the first round fills the store and warms up
                    runs.append(answers[0])
            found.append(
                {
                    "how": name,
                    "milliseconds": round(statistics.median(1000 * (run.ttft_seconds or 0.0) for run in runs), 2),
                    "reused_tokens": runs[-1].reused_tokens,
                    "recomputed_tokens": runs[-1].recomputed_tokens,
                }
            )
    return found


def _picture(data: dict[str, Any], about: dict[str, Any]) -> Any:
    tokens = data["about"]["tokens"]
    figure = new_figure(12, 4.4, f"Chunks of {sum(tokens) / len(tokens):.0f} tokens: {about['model']}")
    sizes, times, first = figure.subplots(1, 3, width_ratios=(1, 1.9, 1.1))
    rows = data["chunks"]
    names = [row["method"] for row in rows]
    for number, row in enumerate(rows):
        mib = row["chunk_bytes"] / 2**20
        sizes.bar(number, mib, color=COLOURS[number % len(COLOURS)])
        sizes.text(number, mib, f"{mib:.2f}", ha="center", va="bottom", fontsize=8)
    sizes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    sizes.set(ylabel="MiB per chunk")
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        at = [place + (number - (len(rows) - 1) / 2) * width for place in range(len(OPERATIONS))]
        values = [row["milliseconds"][name] for name in OPERATIONS]
        times.bar(at, values, width, color=COLOURS[number % len(COLOURS)], label=row["method"])
    times.set_xticks(range(len(OPERATIONS)), list(OPERATIONS.values()), rotation=30, ha="right", fontsize=8)
    times.set_yscale("log")
    times.set(ylabel="milliseconds per chunk (log)")
    times.legend(fontsize=8)
    for number, row in enumerate(data["first_token"]):
        first.bar(number, row["milliseconds"], color="#7f7f7f")
        first.text(number, row["milliseconds"], f"{row['milliseconds']:.0f}", ha="center", va="bottom", fontsize=8)
    ways = [row["how"] for row in data["first_token"]]
    first.set_xticks(range(len(ways)), ways, rotation=30, ha="right", fontsize=8)
    first.set(ylabel=f"ms to the first token over {data['about']['passages']} passages")
    return figure
