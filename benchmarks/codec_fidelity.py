"""Measure codecs: bytes of a long cache, and how far next-token distributions move from those of the full cache.

    python benchmarks/codec_fidelity.py --text FOLDER --out benchmarks/results/codec_fidelity.json [--method SPEC ...]

Bytes: one layer of 8 heads of size 128 in bfloat16 after 4,096 tokens, as a share of its keys and values.
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

# gear has groups of 64: its base is compared with plain groups of 64.
METHODS = (
    "kvquant(bits=3)", "kivi(bits=2)", "gear(bits=4)", "int4(group=64)", "gear(bits=2)", "int2(group=64)",
    "think(ratio=0.5)", "kivi(bits=4)", "int4()", "rotate()+int4()", "kvquant(bits=2)", "kvquant(bits=4)",
    "minicache()", "int8()", "fp8()", "int2()", "rotate()+int2()", "kivi(bits=2, group=64)", "think(ratio=0.3)",
    "rotate()+kivi(bits=2)", "snapkv(budget=0.2)+kivi(bits=2)",
)  # fmt: skip
# Pieces as long as the stride at which codecs write: no more rows are read whole than in decode token by token.
WINDOW, PROMPT, PIECE = 1024, 256, 32


def share(method: Method, tokens: int = 4096, heads: int = 8, dim: int = 128) -> float | None:
    """Stored bytes over those of bfloat16 keys and values; None for a method that needs a model."""
    if method.needs_model is not None:
        return None
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, tokens, dim, generator=generator).bfloat16() for _ in range(3))
    return method.compress(query, key, value).nbytes / (2 * key.numel() * 2)


def logits(model: Any, tokenizer: Any, spec: str | None, ids: Tensor) -> Tensor:
    """Logits behind the prompts, [windows, tokens, vocabulary] in float32."""
    return force(model, tokenizer, ids, torch.ones_like(ids), WINDOW - PROMPT, spec, piece=PIECE).logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", action="append", help="a spec; repeatable (default: all plain codecs)")
    parser.add_argument("--text", type=Path, help="folder of texts (default: generated prose)")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
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
                               "tokens": tokens, "prompt": PROMPT, "piece": PIECE, "torch": torch.__version__,
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
            "share_of_bf16": share(method),
            "seconds": round(time.perf_counter() - began, 1),
        }
        results["methods"][str(method)] = entry
        shown = f"KL {entry['kl']:.5f}  top-1 {entry['top1_agreement']:.4f}  bytes {entry['share_of_bf16']}"
        print(f"{method!s:34} {shown}", flush=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
