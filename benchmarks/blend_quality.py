"""What blending costs in answers: F1 and divergence from full prefill, for every selector and several ratios.

    python benchmarks/blend_quality.py [--model smollm2] [--also FILE ...] [--also-samples 12] [--resume] [--tables]

Questions over passages: the project's own set, whole, and the first samples of other files in the forms that
`kvfoundry eval ragqa` reads (HotpotQA and MuSiQue, say). Every passage is read once behind the worked example that
opens the prompt, and blended in the order of the sample. Full prefill and all arms read the same token ids. The
divergence is KL(full || arm) over the tokens of the answer that full prefill gives, forced on every arm; F1 is that of
the arm's own greedy answer. Intervals are percentiles of a paired bootstrap over samples. Writes
benchmarks/results/blend_quality.json after every sample, and the table of docs/blend.md at the end; --resume goes on
with a run that was cut short, --tables only renews the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import kvfoundry
from kvfoundry import compat
from kvfoundry.blend import Segments, blend_chunks, segment
from kvfoundry.chunks.passage import read_passage
from kvfoundry.evaluate.prompts import line_stops
from kvfoundry.evaluate.tasks.base import Item
from kvfoundry.evaluate.tasks.ragqa import EXAMPLE, RagTask
from kvfoundry.evaluate.tasks.ragqa_data import OWN_DATA, RagSample, load_ragqa

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "blend_quality.json"
PAGE = ROOT / "docs" / "blend.md"
FULL = "full prefill"
RATIOS = (0.05, 0.15, 0.3)
SELECTORS = ("deviation", "query_aware", "query_aware, check=(2, 8)", "first_k_per_chunk", "random")
# (what a passage is read behind, blend); the worked example unless it says otherwise.
ARMS: tuple[tuple[str, str], ...] = (
    ("head", "blend(ratio=0, select=none)"),
    *(("head", f"blend(ratio={ratio}, select={name})") for name in SELECTORS for ratio in RATIOS),
    ("head", "blend(ratio=0.15, check=(1, 3, 6))"),
    ("head", "blend(ratio=1.0)"),
    ("start", "blend(ratio=0, select=none)"),
    ("start", "blend(ratio=0.15, select=query_aware, check=(2, 8))"),
)
RESAMPLES = 2000


class Reader:
    """Reads one sample in every way."""

    def __init__(self, model: Any, tokenizer: Any, new_tokens: int):
        self.model, self.tokenizer, self.new_tokens = model, tokenizer, new_tokens
        self.stops = torch.tensor(line_stops(model, tokenizer)["eos_token_id"])

    def _feed(self, cache: Any, ids: list[int]) -> Tensor:
        """Logits [tokens, vocabulary] of tokens that come next."""
        mask = torch.ones(1, cache.seen_tokens + len(ids), dtype=torch.long)
        tokens = torch.tensor([ids])
        return self.model(tokens, attention_mask=mask, use_cache=True, **{compat.CACHE_ARGUMENT: cache}).logits[0]

    def _best(self, logits: Tensor, first: bool) -> int:
        """The greedy token; the answer does not end before it has begun."""
        return int(logits.index_fill(0, self.stops, -torch.inf).argmax() if first else logits.argmax())

    def _continued(self, cache: Any, tokens: list[int]) -> list[int]:
        """An answer, greedy from the newest of its tokens on, which the cache has not read; a line ends it."""
        while tokens[-1] not in self.stops and len(tokens) < self.new_tokens:
            tokens.append(self._best(self._feed(cache, tokens[-1:])[-1], first=False))
        return tokens

    def full(self, prompt: Segments) -> tuple[list[int], Tensor]:
        """The answer of full prefill, and log-probabilities [answer, vocabulary] at each of its tokens."""
        cache = kvfoundry.KVCache(self.model)
        self._feed(cache, prompt.ids[: -len(prompt.question)])
        asked = cache.fork()
        first = self._feed(asked, list(prompt.question))[-1]
        answer = self._continued(asked, [self._best(first, first=True)])
        return answer, self.forced(cache, prompt, answer)[1]

    def forced(self, cache: Any, prompt: Segments, answer: list[int]) -> tuple[list[int], Tensor]:
        """The answer of a cache that has read the documents, and its log-probabilities at the tokens of `answer`."""
        fork = cache.fork()
        logits = self._feed(fork, [*prompt.question, *answer[:-1]])[-len(answer) :]
        own = [self._best(row, first=not i) for i, row in enumerate(logits)]
        apart = next((i for i, (a, b) in enumerate(zip(own, answer, strict=True)) if a != b), None)
        if apart is not None:
            fork.crop(-(len(answer) - 1 - apart))
            own = self._continued(fork, own[: apart + 1])
        return own, logits.log_softmax(dim=-1)

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


@torch.inference_mode()
def read_sample(reader: Reader, task: RagTask, sample: RagSample, item: Item) -> dict[str, dict[str, float]]:
    """F1, divergence, agreement and share computed again, of every arm on one sample."""
    documents = [f"{each.title}: {each.text}" if each.title else each.text for each in sample.passages]
    prompt = segment(reader.tokenizer, documents, item.question.lstrip("\n"), head=EXAMPLE)
    answer, wanted = reader.full(prompt)
    rows = {FULL: {"f1": task.score(item, reader.text(answer))[0], "kl": 0.0, "same": 1.0, "share": 1.0}}
    head = read_passage(reader.model, prompt.head)
    chunks = {
        behind: [read_passage(reader.model, own, context_ids=front) for own in prompt.passages]
        for behind, front in (("head", prompt.head), ("start", ()))
    }
    for behind, spec in ARMS:
        blended = blend_chunks(reader.model, [[head, *chunks[behind]]], [prompt.question], blend=spec)
        own, said = reader.forced(blended.cache, prompt, answer)
        rows[f"{behind}: {spec}"] = {
            "f1": task.score(item, reader.text(own))[0],
            "kl": float((wanted.exp() * (wanted - said)).sum(dim=-1).mean()),
            "same": float(own == answer),
            "share": blended.recomputed_tokens[0] / blended.context_ids.shape[1],
        }
    return rows


def bootstrap(values: list[float]) -> tuple[float, float]:
    """A 95 % interval of the mean over samples."""
    rng = random.Random(0)
    means = sorted(sum(rng.choices(values, k=len(values))) / len(values) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


def summary(rows: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Means and intervals by arm; F1 in points, and what it loses against full prefill, pair by pair."""
    full, found = rows[FULL], []
    for arm, own in rows.items():
        loss = [100 * (a["f1"] - b["f1"]) for a, b in zip(full, own, strict=True)]
        columns = {"f1": [100 * row["f1"] for row in own], "f1_loss": loss, "kl": [row["kl"] for row in own]}
        entry: dict[str, Any] = {"arm": arm}
        for name, values in columns.items():
            entry[name] = round(sum(values) / len(values), 4)
            entry[f"{name}_interval"] = [round(bound, 4) for bound in bootstrap(values)]
        for name in ("same", "share"):
            entry[name] = round(sum(row[name] for row in own) / len(own), 4)
        found.append(entry)
    return found


def table(record: dict[str, Any]) -> str:
    """The table of docs/blend.md."""
    sets = ", ".join(f"{count} of {name}" for name, count in record["sets"].items())
    lines = [
        f"{record['samples']} of {record['asked']} questions ({sets}).",
        "",
        "| behind | blend | computed again | F1 | F1 lost (95 %) | KL to full prefill (95 %) | same answer |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["arms"]:
        behind, _, spec = row["arm"].rpartition(": ")
        loss, kl = row["f1_loss_interval"], row["kl_interval"]
        lines.append(
            f"| {behind} | {f'`{spec}`' if behind else spec} | {row['share']:.1%} | {row['f1']:.1f} | "
            f"{row['f1_loss']:.1f} ({loss[0]:.1f} to {loss[1]:.1f}) | {row['kl']:.3f} ({kl[0]:.3f} to {kl[1]:.3f}) | "
            f"{row['same']:.0%} |"
        )
    return "\n".join(lines)


def write_table(record: dict[str, Any]) -> None:
    text = PAGE.read_text()
    pattern = r"(<!-- quality:begin.*?-->\n).*?(<!-- quality:end -->)"
    PAGE.write_text(re.sub(pattern, lambda match: match[1] + table(record) + "\n" + match[2], text, flags=re.DOTALL))


def questions(tokenizer: Any, also: list[Path], most: int) -> list[tuple[str, RagTask, RagSample, Item]]:
    """What is asked: our own set, and the first samples of other files."""
    found = []
    for path in (OWN_DATA, *also):
        task = RagTask(load_ragqa(path))
        name = "kvfoundry" if path == OWN_DATA else path.name.partition(".")[0]
        pairs = list(zip(task.data.samples, task.items(tokenizer, False, 0), strict=True))
        found += [(name, task, *pair) for pair in (pairs if path == OWN_DATA else pairs[:most])]
    return found


def record_of(rows: dict[str, list[dict[str, float]]], sets: list[str], **about: Any) -> dict[str, Any]:
    """All that is kept of a run, finished or not."""
    by_set = {}
    for name in dict.fromkeys(sets):
        places = [i for i, own in enumerate(sets) if own == name]
        by_set[name] = summary({arm: [own[i] for i in places] for arm, own in rows.items()})
    return {
        "what": "questions over passages: F1, loss against full prefill in points, and KL(full || arm) in nats",
        **about,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sets": {name: sets.count(name) for name in by_set},
        "arms": summary(rows),
        "by_set": by_set,
        "by_sample": {arm: [{k: round(v, 5) for k, v in row.items()} for row in own] for arm, own in rows.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="further files of questions over passages")
    parser.add_argument("--also-samples", type=int, default=12, help="how many samples of each of them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on with the results that are there")
    parser.add_argument("--tables", action="store_true", help="renew the table from the results that are there")
    arguments = parser.parse_args()
    if not arguments.tables:
        torch.set_num_threads(arguments.threads)
        model, tokenizer = kvfoundry.load(arguments.model, device="cpu")
        began, before = time.perf_counter(), json.loads(RESULTS.read_text()) if arguments.resume else {}
        rows: dict[str, list[dict[str, float]]] = before.get("by_sample", {})
        sets = [name for name, count in before.get("sets", {}).items() for _ in range(count)]
        asked = questions(tokenizer, arguments.also, arguments.also_samples)
        for number, (name, task, sample, item) in enumerate(asked[len(sets) :], start=len(sets) + 1):
            reader = Reader(model, tokenizer, task.max_new_tokens)
            for arm, row in read_sample(reader, task, sample, item).items():
                rows.setdefault(arm, []).append(row)
            sets.append(name)
            print(f"{number} of {len(asked)} samples, {time.perf_counter() - began:.0f} s", flush=True)
            about = {"model": arguments.model, "dtype": str(model.dtype), "asked": len(asked)}
            spent = round(before.get("seconds", 0) + time.perf_counter() - began)
            record = record_of(rows, sets, **about, samples=number, seconds=spent)
            RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    record = json.loads(RESULTS.read_text())
    print(table(record))
    write_table(record)


if __name__ == "__main__":
    main()
