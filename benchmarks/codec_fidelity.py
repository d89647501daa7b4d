"""Measure codecs: how far next-token distributions move from those of the full cache.

    python benchmarks/codec_fidelity.py --text FOLDER [--method SPEC ...] [--out FILE]

Fidelity: teacher forcing over windows of text. The prompt of each window is read at once, the rest in pieces, so that
every later token reads codes; mean KL(full || codec) in nats, and the share of tokens with the same top-1.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import kvfoundry
from kvfoundry.evaluate.fidelity import compare, force
from kvfoundry.evaluate.tasks.haystack import folder_sentences, generated_sentences
from kvfoundry.method import Method

RESULTS = Path(__file__).resolve().parent / "results" / "codec_fidelity.json"
BYTES = RESULTS.with_name("codec_bytes.json")
PAGE = RESULTS.parents[2] / "docs" / "codecs.md"
# gear has groups of 64: its base is compared with plain groups of 64.
METHODS = (
    "kvquant(bits=3)", "kivi(bits=2)", "gear(bits=4)", "int4(group=64)", "gear(bits=2)", "int2(group=64)",
    "think(ratio=0.5)", "kivi(bits=4)", "int4()", "rotate()+int4()", "kvquant(bits=2)", "kvquant(bits=4)",
    "minicache()", "int8()", "fp8()", "int2()", "rotate()+int2()", "kivi(bits=2, group=64)", "think(ratio=0.3)",
    "rotate()+kivi(bits=2)", "snapkv(budget=0.2)+kivi(bits=2)",
)  # fmt: skip
# Pieces as long as the stride at which codecs write: no more rows are read whole than in decode token by token.
WINDOW, PROMPT, PIECE = 1024, 256, 32


def logits(model: Any, tokenizer: Any, spec: str | None, ids: Tensor) -> Tensor:
    """Logits behind the prompts, [windows, tokens, vocabulary] in float32."""
    return force(model, tokenizer, ids, torch.ones_like(ids), WINDOW - PROMPT, spec, piece=PIECE).logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", action="append", help="a spec; repeatable (default: all plain codecs)")
    parser.add_argument("--text", type=Path, help="folder of texts (default: generated prose)")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    model, tokenizer = kvfoundry.load(arguments.model)
    sentences = iter(folder_sentences(arguments.text) if arguments.text else generated_sentences(0))
    ids: list[int] = []
    while len(ids) < arguments.windows * WINDOW:
        ids += tokenizer(next(sentences) + " ", add_special_tokens=False)["input_ids"]
    windows = torch.tensor(ids[: arguments.windows * WINDOW]).view(arguments.windows, WINDOW)
    full = logits(model, tokenizer, None, windows)
    tokens = arguments.windows * (WINDOW - PROMPT)
    results: dict[str, Any] = {"model": arguments.model, "text": str(arguments.text and arguments.text.name),
                               "tokens": tokens, "prompt": PROMPT, "torch": torch.__version__,
                               "methods": {}}  # fmt: skip
    if arguments.out.exists():  # other specs measured before stay
        results["methods"] = json.loads(arguments.out.read_text())["methods"]
    for spec in arguments.method or METHODS:
        method, began = Method.parse(spec), time.perf_counter()
        found = [
            compare(a, b, window[PROMPT:])
            for a, b, window in zip(full, logits(model, tokenizer, spec, windows), windows, strict=True)
        ]
        entry = {
            "kl": fmean(one.kl for one in found),
            "top1_agreement": fmean(one.agreement for one in found),
            "piece": PIECE,
            "seconds": round(time.perf_counter() - began, 1),
        }
        results["methods"][str(method)] = entry
        print(f"{method!s:34} KL {entry['kl']:.5f}  top-1 {entry['top1_agreement']:.4f}", flush=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.out == RESULTS:
        PAGE.write_text(page(results))


def page(results: dict[str, Any]) -> str:
    """docs/codecs.md: what each codec loses, beside the bytes that benchmarks/codec_bytes.py found."""
    held = {row["spec"]: row["share_of_bf16"] for row in json.loads(BYTES.read_text())["rows"]}
    lines = [
        "# Codecs",
        "",
        f"Made by `python benchmarks/codec_fidelity.py`: {results['model']}, {results['tokens']} tokens of essays",
        f"under teacher forcing (prompts of {results['prompt']} tokens, the rest in pieces of 8 or 32), against the",
        "full cache; figures in",
        "`benchmarks/results/codec_fidelity.json`. *Share of bf16*: summed storages at 4,096 tokens and head size 128,",
        "positions and whole newest rows included, from `benchmarks/codec_bytes.py`.",
        "",
        "| codec | mean KL divergence | top-1 agreement | share of bf16 |",
        "|---|---|---|---|",
    ]
    for spec, entry in sorted(results["methods"].items(), key=lambda item: item[1]["kl"]):
        share = f"{held[spec]:.3f}" if spec in held else ""
        lines.append(f"| `{spec}` | {entry['kl']:.5f} | {entry['top1_agreement']:.3f} | {share} |")
    missing = [str(Method.parse(spec)) for spec in METHODS if str(Method.parse(spec)) not in results["methods"]]
    if missing:
        lines += ["", "Not measured yet: " + ", ".join(f"`{spec}`" for spec in missing) + "."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
