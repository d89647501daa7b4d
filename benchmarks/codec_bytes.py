"""Stored bytes of every codec after 4,096 tokens, as a share of the full cache in bfloat16.

    python benchmarks/codec_bytes.py [--out benchmarks/results/codec_bytes.json]

A Llama of four layers with random weights and heads of size 128: bytes depend on shapes alone. They are the storages
behind all parts, each counted once: codes, scales, levels, outliers, positions, the whole newest rows.
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import kvfoundry

ROOT = Path(__file__).resolve().parents[1]
TOKENS, HEADS, HEAD_DIM, LAYERS = 4096, 2, 128, 4
# Newest rows that kivi leaves whole: at most its residual of 128.
TAIL = 128 / TOKENS
TARGETS = {
    "int8()": None, "int4()": None, "int2()": None, "fp8()": None,
    "kivi(bits=2)": 0.22, "kivi(bits=2, group=64)": 0.19, "kivi(bits=4)": 0.34,
    "kvquant(bits=2)": None, "kvquant(bits=3)": 0.28, "kvquant(bits=4)": None,
    "gear(bits=2)": None, "gear(bits=4, rank=4, outlier_ratio=0.02)": 0.45,
    "think(ratio=0.5)": 0.77, "minicache()": 0.80, "snapkv(budget=0.2)+kivi(bits=2)": 0.045 + TAIL,
}  # fmt: skip


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "codec_bytes.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=HEAD_DIM, max_position_embeddings=8192,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.randint(0, 128, (1, TOKENS))
    whole = 2 * LAYERS * HEADS * TOKENS * HEAD_DIM * 2
    rows = []
    for spec, target in TARGETS.items():
        cache = kvfoundry.KVCache(model, spec)
        model(ids, None, None, cache, logits_to_keep=1)
        row = {"spec": str(cache.method), "share_of_bf16": round(cache.nbytes / whole, 4), "target": target}
        row["kept"] = target is None or row["share_of_bf16"] <= target
        rows.append(row)
        print(row, flush=True)
        record = {"tokens": TOKENS, "head_dim": HEAD_DIM, "torch": torch.__version__,
                  "transformers": transformers.__version__, "rows": rows}  # fmt: skip
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
