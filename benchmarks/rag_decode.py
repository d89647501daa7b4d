"""Whether bringing passages in mid-answer helps: F1, stalls and resident attention, for every policy.

    python benchmarks/rag_decode.py [--model smollm2] [--samples 58] [--seconds 0] [--resume] [--tables]

The project's own questions over passages. Room on the device for half of a sample's passages; the others wait on the
host, 50 ms away each. Passages are read behind all that precede them (`--behind sample`), so that an answer over all of
them is that of the plain prompt, and what is lost is lost to absent passages alone. Two orders of passages: the
retriever's, and one by lot, for which half of what an answer needs begins on the host. Waiting arms stop for what they
predicted 4 calls before, or at once (`on demand`). Every answer is read once more over all passages to know what
absent ones would have got. Writes benchmarks/results/rag_decode.json after every sample, and the table of docs/rag.md;
--resume goes on with a run that was cut short, --seconds ends one early, --tables only renews the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

import kvfoundry
from kvfoundry import ChunkStore, Method
from kvfoundry.evaluate.tasks.ragqa_data import OWN_DATA
from kvfoundry.rag import PassageIndex, Retriever, load_dataset, retrieve
from kvfoundry.rag.dataset import Dataset, text_hash
from kvfoundry.rag.decode import Decoder, Settings
from kvfoundry.rag.making import Maker
from kvfoundry.rag.policies import policy
from kvfoundry.rag.prompts import Laid, lay_out_all
from kvfoundry.rag.retrieval_file import Answered, Found, Retrieval
from kvfoundry.rag.room import Room

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "rag_decode.json"
PAGE = ROOT / "docs" / "rag.md"
DELAY, HORIZON = 0.05, 4
# (arm, policy, settings)
ARMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("all resident", "none", {"room": Room(share=1.0)}),
    ("none", "none", {}),
    ("retrieval_rank", "retrieval_rank", {}),
    ("summary", "summary", {}),
    ("summary(by=mass)", "summary(by=mass)", {}),
    ("attention_mass", "attention_mass", {}),
    ("bandit", "bandit", {}),
    ("oracle", "oracle", {}),
    ("summary, waiting", "summary", {"wait": True}),
    ("summary, on demand", "summary", {"wait": True, "horizon": 0}),
)
COLUMNS = ("f1", "stall_seconds", "resident_share", "hit_rate", "promotions")


def by_lot(dataset: Dataset, found: Retrieval) -> Retrieval:
    """The same file with every sample's passages in an order that a seed decides."""
    asked, rng = {each.item: each for each in dataset.samples}, random.Random(0)
    samples: list[Answered] = []
    for answered in found.samples:
        candidates = list(asked[answered.item].candidates)
        rng.shuffle(candidates)
        own = tuple(Found(each.id, 0.0, text_hash(each.passage)) for each in candidates)
        samples.append(replace(answered, own=own))
    return replace(found, k=max(len(each.own or ()) for each in samples), samples=tuple(samples))


def prompts_of(model: Any, tokenizer: Any, folder: Path, new_tokens: int) -> dict[str, list[Laid]]:
    """The prompts of all samples in both orders."""
    dataset = load_dataset(OWN_DATA)
    most = max(len(asked.candidates) for asked in dataset.samples)
    index = PassageIndex(folder, keeps=frozenset())
    index.add(dataset.passages)
    found = retrieve(dataset, index, Retriever.parse("bm25+titles"), k=most, mode="own")
    laid = {}
    for name, own in (("retriever", found), ("by lot", by_lot(dataset, found))):
        laid[name], _ = lay_out_all(tokenizer, model, dataset, own, top=own.k, new_tokens=new_tokens, behind="sample")
    return laid


def read_sample(maker: Maker, prompt: Laid) -> dict[str, dict[str, Any]]:
    """What every arm does with one prompt."""
    identity = maker.identity
    for each, chunk in maker.read_in_order(prompt, list(prompt.candidates)).items():
        key = next(own for own in prompt.candidates if own.id == each).key(identity)
        maker.store.put(key, chunk)
    rows = {}
    for arm, name, how in ARMS:
        own = {"room": Room(share=0.5), "delay": DELAY, "horizon": HORIZON, "measure": True, **how}
        answer = Decoder(maker, Settings(policy(name), **own)).answer(prompt)
        told = {"f1": answer.f1, "seconds": answer.seconds, **answer.sums()}
        rows[arm] = {key: value if value is None else round(float(value), 5) for key, value in told.items()}
        rows[arm]["text"] = answer.text.strip()
    maker.store.clear()
    return rows


def summary(samples: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Means by order and arm."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for order in dict.fromkeys(each["order"] for each in samples):
        own = [each["arms"] for each in samples if each["order"] == order]
        found[order] = {
            arm: {name: round(sum(rows[arm][name] for rows in own) / len(own), 4) for name in COLUMNS}
            for arm, _, _ in ARMS
        }
        found[order]["samples"] = {"count": len(own)}
    return found


def table(record: dict[str, Any]) -> str:
    """The table of docs/rag.md."""
    lines = [
        f"{record['model']} in {record['dtype']}, {record['threads']} thread(s) of a shared CPU.",
        "",
        "| order | policy | F1 | waited, ms per answer | resident attention | best one resident | came |",
        "|---|---|---|---|---|---|---|",
    ]
    for order, arms in record["summary"].items():
        count = arms["samples"]["count"]
        for arm, _, _ in ARMS:
            row = arms[arm]
            lines.append(
                f"| {order}, {count} of {record['asked']} | {arm} | {100 * row['f1']:.1f} | "
                f"{1000 * row['stall_seconds']:.0f} | {row['resident_share']:.1%} | {row['hit_rate']:.0%} | "
                f"{row['promotions']:.2f} |"
            )
    return "\n".join(lines)


def write_table(record: dict[str, Any]) -> None:
    pattern = r"(<!-- decode:begin.*?-->\n).*?(<!-- decode:end -->)"
    text = re.sub(pattern, lambda match: match[1] + table(record) + "\n" + match[2], PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(text)


def measure(arguments: argparse.Namespace) -> None:
    """Answer what is missing, and write after every sample."""
    torch.set_num_threads(arguments.threads)
    model, tokenizer = kvfoundry.load(arguments.model, device="cpu")
    began = time.perf_counter()
    before = json.loads(RESULTS.read_text()) if arguments.resume and RESULTS.exists() else {}
    samples: list[dict[str, Any]] = before.get("samples", [])
    done = {(each["order"], each["item"]) for each in samples}
    with ChunkStore("host:1GiB") as store:
        maker = Maker(model, tokenizer, store, Method.parse("fullkv"))
        laid = prompts_of(model, tokenizer, arguments.index, Settings().new_tokens)
        # The orders take turns, and samples are spread over the set, so that a run that was cut short is no beginning.
        order = random.Random(1).sample(range(len(laid["retriever"])), min(arguments.samples, len(laid["retriever"])))
        for name, prompt in [(name, laid[name][number]) for number in order for name in laid]:
            if (name, prompt.item) in done:
                continue
            if arguments.seconds and time.perf_counter() - began > arguments.seconds:
                break
            samples.append({"order": name, "item": prompt.item, "arms": read_sample(maker, prompt)})
            record = {
                "what": "answers over half of the passages, others 50 ms away; F1 by arm, means over samples",
                "model": arguments.model, "dtype": str(model.dtype).removeprefix("torch."), "asked": len(laid[name]),
                "delay": DELAY, "horizon": HORIZON, "threads": arguments.threads, "machine": platform.machine(),
                "torch": torch.__version__, "transformers": transformers.__version__,
                "seconds": round(before.get("seconds", 0) + time.perf_counter() - began),
                "summary": summary(samples), "samples": samples,
            }  # fmt: skip
            RESULTS.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{len(samples)} prompts, {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--samples", type=int, default=58, help="how many questions")
    parser.add_argument("--seconds", type=float, default=0, help="begin no further sample after so long")
    parser.add_argument("--index", type=Path, default=Path("rag_decode_index"), help="folder of the passage index")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on with the results that are there")
    parser.add_argument("--tables", action="store_true", help="renew the table from the results that are there")
    arguments = parser.parse_args()
    if not arguments.tables:
        measure(arguments)
    record = json.loads(RESULTS.read_text())
    print(table(record))
    write_table(record)


if __name__ == "__main__":
    main()
