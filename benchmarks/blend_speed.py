"""Time to the first token of a prompt of stored passages, blended at several ratios, against reading the prompt whole.

    python benchmarks/blend_speed.py [--model smollm2] [--passages 8] [--tokens 256] [--rounds 3] [--device cpu]

All arms take turns in one process, and each ratio of times is taken within its round: machines drift, rounds do not.
The chunks lie in the host tier of a store; looking them up, moving keys, choosing, computing again and reading the
question are all inside the time. Nothing is written when the blend of ratio 1 does not give the logits of the whole
prompt. Writes benchmarks/results/blend_speed.json and the table of docs/blend.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import kvfoundry
from kvfoundry import compat
from kvfoundry.blend import blend_chunks
from kvfoundry.chunks.passage import read_passage

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "blend_speed.json"
PAGE = ROOT / "docs" / "blend.md"
SPECS = (
    "blend(ratio=0, select=none)",
    "blend(ratio=0.05)",
    "blend(ratio=0.15)",
    "blend(ratio=0.15, check=(1, 3, 6))",
    "blend(ratio=0.15, select=query_aware)",
    "blend(ratio=0.15, select=query_aware, check=(2, 8))",
    "blend(ratio=0.15, select=first_k_per_chunk)",
    "blend(ratio=0.3)",
    "blend(ratio=1.0)",
)


class Arms:
    """One prompt, and every way to its first token: logits of the last token [vocabulary]."""

    def __init__(self, model: Any, passages: int, tokens: int, question: int):
        generator = torch.Generator().manual_seed(passages * tokens)
        top = model.config.vocab_size - 100
        self.model = model
        self.passages = [torch.randint(100, top, (tokens,), generator=generator).tolist() for _ in range(passages)]
        self.question = torch.randint(100, top, (question,), generator=generator).tolist()
        self.store = kvfoundry.ChunkStore("host:4GiB")
        self.identity = kvfoundry.Identity.of(model)
        chunks = [read_passage(model, passage) for passage in self.passages]
        self.keys = [self.identity.key(passage) for passage in self.passages]
        for key, chunk in zip(self.keys, chunks, strict=True):
            self.store.put(key, chunk)
        self.chunk_bytes = sum(chunk.nbytes for chunk in chunks)

    def _read(self, ids: Tensor, cache: Any, past: int) -> Tensor:
        mask = torch.ones(1, past + ids.shape[1], dtype=torch.long, device=ids.device)
        output = self.model(
            ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **{compat.CACHE_ARGUMENT: cache}
        )
        return output.logits[0, -1]

    def whole(self) -> Tensor:
        """The prompt read as it is."""
        ids = torch.tensor([[*(token for own in self.passages for token in own), *self.question]])
        return self._read(ids.to(self.model.device), kvfoundry.KVCache(self.model), 0)

    def blended(self, spec: str) -> Tensor:
        """The prompt blended from the store's chunks."""
        found = [self.store.get(key) for key in self.keys]
        chunks = [chunk for chunk in found if chunk is not None]
        assert len(chunks) == len(self.keys), "a chunk is missing from the store"
        blended = blend_chunks(self.model, [chunks], [self.question], blend=spec)
        return self._read(blended.question_ids, blended.cache, blended.context_ids.shape[1])


def timed(arm: Callable[[], Tensor], device: torch.device) -> tuple[float, Tensor]:
    """Seconds until the first token is known, and its logits."""
    start = time.perf_counter()
    logits = arm()
    logits.argmax().item()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, logits


@torch.inference_mode()
def measure(arms: Arms, rounds: int) -> list[dict[str, Any]]:
    """Median seconds and median ratio to the whole prompt, for every spec."""
    device = arms.model.device
    reference = arms.whole()
    if (apart := float((arms.blended("blend(ratio=1.0)") - reference).abs().max())) > 1e-3 * float(
        reference.abs().max()
    ):
        raise SystemExit(f"blending with ratio 1 is {apart:.2g} away from the whole prompt: no time is written.")
    times: dict[str, list[float]] = {spec: [] for spec in ("whole prompt", *SPECS)}
    for turn in range(rounds):
        for spec in times if turn % 2 == 0 else reversed(times):
            arm = arms.whole if spec == "whole prompt" else lambda spec=spec: arms.blended(spec)
            times[spec].append(timed(arm, device)[0])
    whole = times["whole prompt"]
    return [
        {
            "arm": spec,
            "seconds": round(statistics.median(own), 4),
            "share_of_whole": round(statistics.median(a / b for a, b in zip(own, whole, strict=True)), 4),
            "shares": [round(a / b, 4) for a, b in zip(own, whole, strict=True)],
        }
        for spec, own in times.items()
    ]


def write_table(record: dict[str, Any]) -> None:
    """Renew the table of docs/blend.md."""
    lines = [
        f"{record['passages']} passages of {record['tokens_per_passage']} tokens and a question of "
        f"{record['question_tokens']}, {record['model']} in {record['dtype'].removeprefix('torch.')}, "
        f"{record['threads']} thread(s) on {record['machine']}, medians of {record['rounds']} rounds; "
        f"chunks of {record['chunk_bytes'] / 2**20:.0f} MiB in host memory.",
        "",
        "| prompt | time to first token | share of the whole prompt |",
        "|---|---|---|",
    ]
    for row in record["rows"]:
        name = row["arm"] if row["arm"] == "whole prompt" else f"`{row['arm']}`"
        lines.append(f"| {name} | {row['seconds']:.2f} s | {row['share_of_whole']:.2f} |")
    pattern = r"(<!-- speed:begin.*?-->\n).*?(<!-- speed:end -->)"
    text = re.sub(pattern, lambda m: m[1] + "\n".join(lines) + "\n" + m[2], PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--question", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model, _ = kvfoundry.load(arguments.model, device=arguments.device)
    arms = Arms(model, arguments.passages, arguments.tokens, arguments.question)
    rows = measure(arms, arguments.rounds)
    for row in rows:
        print(f"{row['arm']:46} {row['seconds']:8.3f} s  {row['share_of_whole']:.3f}", flush=True)
    record = {
        "what": "time to first token from chunks in host memory, over that of the whole prompt in the same round",
        "model": arguments.model,
        "dtype": str(model.dtype),
        "passages": arguments.passages,
        "tokens_per_passage": arguments.tokens,
        "question_tokens": arguments.question,
        "chunk_bytes": arms.chunk_bytes,
        "rounds": arguments.rounds,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {model.device.type}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": rows,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    write_table(record)


if __name__ == "__main__":
    main()
