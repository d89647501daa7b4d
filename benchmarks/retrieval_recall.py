"""Recall@5 of the passages that an answer needs, for every retriever, among a question's own passages and among all.

    python benchmarks/retrieval_recall.py --data ../shared/data [--work retrieval-work]
    python benchmarks/retrieval_recall.py --page            # renew the tables of docs/retrieval.md from the results

Reads hotpotqa_train100 and musique_train100 from the data folder, and our own question set. Vectors are made once and
stay in the work folder. Writes benchmarks/results/retrieval_recall.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from kvfoundry.evaluate.tasks.ragqa_data import OWN_DATA
from kvfoundry.rag import DEFAULT, Dataset, PassageIndex, Retriever, fill_index, load_dataset, retrieve
from kvfoundry.rag.encoders.mean_pooled import MeanPooledEncoder
from kvfoundry.rag.encoders.minilm import minilm_folder

RESULTS = Path(__file__).resolve().parent / "results" / "retrieval_recall.json"
PAGE = RESULTS.parents[2] / "docs" / "retrieval.md"
LABELLED = ("hotpotqa_train100", "musique_train100")

BASE = "dense(weight=0.8)+bm25(weight=0.2)"
RETRIEVERS = (
    "bm25", "dense", "maxsim", "dense+bm25+ranks", "maxsim+bm25+ranks", "dense+maxsim+ranks", "dense+bm25+maxsim+ranks",
    BASE, "dense(weight=0.4)+maxsim(weight=0.4)+bm25(weight=0.2)", f"{BASE}+rerank", "bm25+titles", "dense+titles",
    f"{BASE}+titles", "dense(weight=0.4)+maxsim(weight=0.4)+bm25(weight=0.2)+titles", f"{BASE}+rerank+titles",
)  # fmt: skip
# What each part of `titles` brings, and how much its strength matters.
TITLES = (
    *(f"{BASE}+titles(named={named}, linked={linked})" for named, linked in ((3.0, 0.0), (0.0, 3.0))),
    *(f"{BASE}+titles(named={size}, linked={size})" for size in (1.0, 2.0, 4.0)),
    *(f"{BASE}+titles(first={first})" for first in (1, 3, 5)),
)  # fmt: skip
# name -> (tokens of a text that are read, rounded to int8, token vectors pooled into one, retrievers)
STORED = {
    "float32": (256, False, 1, ("dense", "maxsim", DEFAULT)),
    "int8": (256, True, 1, ("dense", "maxsim", DEFAULT)),
    "int8, pool 2": (256, True, 2, ("maxsim",)),
    "int8, pool 3": (256, True, 3, ("maxsim",)),
    "int8, 512 tokens": (512, True, 1, ("dense", DEFAULT)),
}


def measured(dataset: Dataset, index: PassageIndex, spec: str, k: int) -> dict[str, Any]:
    """Recall in both modes and the milliseconds of a question."""
    found: dict[str, Any] = {"retriever": str(Retriever.parse(spec))}
    for mode in ("own", "corpus"):
        start = time.perf_counter()
        result = retrieve(dataset, index, Retriever.parse(spec), k=k, mode=mode)
        spent = (time.perf_counter() - start) / len(dataset.samples)
        recall = result.recall(mode)
        assert recall is not None
        found[mode] = {**asdict(recall), "ms_per_question": round(1000 * spent, 2)}
    return found


def opened(work: Path, dataset: Dataset, name: str, keeps: frozenset[str]) -> tuple[PassageIndex, dict[str, Any]]:
    """An index of the dataset in one stored form, and what it cost."""
    limit, rounded, pool, _ = STORED[name]
    folder = work / f"{dataset.name}-{limit}-{'int8' if rounded else 'float32'}-{pool}-{'-'.join(sorted(keeps))}"
    encoder = MeanPooledEncoder(minilm_folder(), name="minilm", limit=limit)
    index = PassageIndex(folder, encoder, keeps=keeps, rounded=rounded, pool=pool)
    start = time.perf_counter()
    new = fill_index(index, dataset, only=True)
    spent = time.perf_counter() - start
    note = folder / "seconds.json"
    if new == len(dataset.passages):  # not a run that found some of them there
        note.write_text(json.dumps(round(spent, 1)))
    seconds = json.loads(note.read_text()) if note.exists() else None
    size = {
        kind: rows.nbytes
        for kind, rows in (("pooled", index.collection.pooled), ("tokens", index.collection.tokens))
        if rows is not None
    }
    return index, {"passages": len(index), "cut": len(index.cut), "bytes": size, "index_seconds": seconds}


def tables(record: dict[str, Any]) -> dict[str, str]:
    """The tables of docs/retrieval.md: name -> Markdown."""
    sets = record["datasets"]
    hotpot, musique, own = (sets[name] for name in (*LABELLED, "ragqa"))

    def cells(row: dict[str, Any]) -> list[str]:
        return [f"{100 * row[mode]['recall']:.1f}" for mode in ("own", "corpus")]

    def rows(spec: str, *among: list[dict[str, Any]]) -> list[str]:
        return [cell for part in among for row in part if row["retriever"] == spec for cell in cells(row)]

    heading = "| retriever | HotpotQA own | all found | pool | MuSiQue own | all found | pool | ours, own | pool |"
    quality = [heading, "|---|---|---|---|---|---|---|---|---|"]
    parts = ["| retriever | HotpotQA own | pool | MuSiQue own | pool |", "|---|---|---|---|---|"]
    chosen = [str(Retriever.parse(spec)) for spec in RETRIEVERS]
    for one, other in zip(hotpot["rows"], musique["rows"], strict=True):
        spec = one["retriever"]
        assert spec == other["retriever"]
        mark = f"`{spec}`" + (" (default)" if spec == record["default"] else "")
        if spec in chosen:
            wide = [
                value for row in (one, other)
                for value in (cells(row)[0], f"{100 * row['own']['complete']:.0f}", cells(row)[1])
            ]  # fmt: skip
            quality.append(f"| {' | '.join([mark, *wide, *rows(spec, own['rows'])])} |")
        if spec not in chosen or spec == record["default"]:
            parts.append(f"| {' | '.join([mark, *cells(one), *cells(other)])} |")
    stored = [
        "| stored as | retriever | HotpotQA own | pool | MuSiQue own | pool | MB | index s | query ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, form in hotpot["stored"].items():
        there = musique["stored"][name]
        for one, other in zip(form["rows"], there["rows"], strict=True):
            needs = Retriever.parse(one["retriever"]).needs
            size = sum(size for kind, size in there["bytes"].items() if kind in needs) / 1e6
            spent = "" if there["index_seconds"] is None else f"{there['index_seconds']:.0f}"
            speed = f"{other['corpus']['ms_per_question']:.0f}"
            line = [name, f"`{one['retriever']}`", *cells(one), *cells(other), f"{size:.1f}", spent, speed]
            stored.append(f"| {' | '.join(line)} |")
    return {"quality": "\n".join(quality), "parts": "\n".join(parts), "stored": "\n".join(stored)}


def renewed(page: str, record: dict[str, Any]) -> str:
    """The page with its tables as the results have them."""
    for name, table in tables(record).items():
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        page = pattern.sub(lambda match, table=table: match[1] + table + "\n" + match[2], page)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--work", type=Path, default=Path("retrieval-work"))
    parser.add_argument("--page", action="store_true", help="only renew the tables of the docs")
    arguments = parser.parse_args()
    if arguments.page:
        PAGE.write_text(renewed(PAGE.read_text(), json.loads(RESULTS.read_text())))
        return
    torch.set_num_threads(1)

    record: dict[str, Any] = {
        "default": str(Retriever.parse(DEFAULT)),
        "machine": f"{platform.machine()}, one thread",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "datasets": {},
    }
    sets = [(arguments.data / name / f"{name}.json.gz", 5) for name in LABELLED] + [(OWN_DATA, 2)]
    for path, k in sets:
        dataset = load_dataset(path)
        both = frozenset({"pooled", "tokens"})
        index, cost = opened(arguments.work, dataset, "int8", both)
        rows = []
        for spec in (*RETRIEVERS, *(TITLES if k == 5 else ())):
            rows.append(measured(dataset, index, spec, k))
            print(
                dataset.name, rows[-1]["retriever"], rows[-1]["own"]["recall"], rows[-1]["corpus"]["recall"], flush=True
            )
        stored = {}
        if k == 5:
            for name, (limit, _, pool, specs) in STORED.items():
                keeps = both if (limit, pool) == (256, 1) else frozenset({"pooled"} if pool == 1 else {"tokens"})
                held, spent = opened(arguments.work, dataset, name, keeps)
                stored[name] = {**spent, "rows": [measured(dataset, held, spec, k) for spec in specs]}
                print(dataset.name, name, spent, flush=True)
        record["datasets"][dataset.name] = {
            "k": k, "questions": len(dataset.samples), **cost, "rows": rows, "stored": stored,
        }  # fmt: skip
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
