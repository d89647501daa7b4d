"""Which model families the cache serves exactly: every causal-LM type of transformers, as a tiny random model.

    python benchmarks/families.py            writes docs/families.md and benchmarks/results/families.json

For each type: the model's own eager attention against the full cache through kvfoundry, on a left-padded batch of two,
logits and 8 greedy tokens; then an evicting method, whose next position must go on counting. A type is *exact*,
*refused* by name with the reason, or *not tried* because a tiny config of it cannot be built or does not run by itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT_PARAMETERS = 60_000_000
SECONDS = 90

# Names under which configs keep the sizes that make a model small.
_TINY = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "embed_dim", "model_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "attention_num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "feed_forward_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "n_group", "topk_group"), 1),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
    "vocab_size": 256,
    "sliding_window": 16,
    "max_position_embeddings": 256,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}


def tiny_configs(config_class: Any) -> Iterator[Any]:
    """Small configs of this type, the likeliest to be consistent first: built small, then shrunk in place."""
    default = config_class()
    with contextlib.suppress(Exception):
        built = config_class(**_sizes(default), pad_token_id=0, bos_token_id=1, eos_token_id=None)
        yield built
        yield _shrunk(built)
    with contextlib.suppress(Exception):
        yield _shrunk(default)


def _sizes(config: Any) -> dict[str, Any]:
    # Latent attention (DeepSeek) rotates its own few channels, calls their number head_dim, and groups no heads.
    latent = {"head_dim": _TINY["qk_rope_head_dim"], "num_key_value_heads": 4}
    sizes = _TINY | (latent if hasattr(config, "qk_rope_head_dim") else {})
    optional = ("head_dim", "num_key_value_heads")
    names = [name for name in sizes if (hasattr(config, name) if name in optional else getattr(config, name, None))]
    found = {name: sizes[name] for name in names}
    if kinds := list(dict.fromkeys(getattr(config, "layer_types", None) or [])):
        found["layer_types"] = [kinds[i % len(kinds)] for i in range(4)]
    return found


def _shrunk(config: Any) -> Any:
    text = config.get_text_config(decoder=True)
    for part in {id(config): config, id(text): text}.values():
        for name, value in (_sizes(part) | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}).items():
            _set(part, name, value)
    return config


def _set(config: Any, name: str, value: Any) -> None:
    # Some configs compute a size from others; those keep what they compute.
    with contextlib.suppress(AttributeError, NotImplementedError):
        setattr(config, name, value)


def examine(model_type: str) -> dict[str, Any]:
    """One row of the table."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    import kvfoundry

    torch.set_num_threads(1)
    torch.manual_seed(0)
    reason = ""
    for config in tiny_configs(CONFIG_MAPPING[model_type]):
        row = _examine(config, torch, AutoModelForCausalLM, kvfoundry)
        if row["outcome"] != "not tried":
            return row
        reason = reason or row["reason"]
    return {"outcome": "not tried", "reason": reason}


def _examine(config: Any, torch: Any, AutoModelForCausalLM: Any, kvfoundry: Any) -> dict[str, Any]:
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > LIMIT_PARAMETERS:
            return {"outcome": "not tried", "reason": f"the smallest config still has {size / 1e6:.0f}M parameters"}
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        ids = torch.randint(3, 250, (2, 40))
        mask = torch.ones_like(ids)
        ids[1, :13], mask[1, :13] = 0, 0
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            expected_tokens = model.generate(ids, attention_mask=mask, **options)
            expected = model(ids, attention_mask=mask).logits.float()
        assert torch.isfinite(expected[mask.bool()]).all()
    except Exception as error:
        return {"outcome": "not tried", "reason": f"a tiny model does not run by itself: {_line(error)}"}
    try:
        cache = kvfoundry.KVCache(model)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, past_key_values=cache).logits.float()
            tokens = model.generate(ids, attention_mask=mask, past_key_values=kvfoundry.KVCache(model), **options)
            small = kvfoundry.KVCache(model, "snapkv(budget=16, window=8)")
            model.generate(ids, attention_mask=mask, past_key_values=small, **options)
    except kvfoundry.KVFoundryError as error:
        return {"outcome": "refused", "reason": _line(error)}
    except Exception as error:
        return {"outcome": "failed", "reason": _line(error)}
    difference = float((logits - expected)[mask.bool()].abs().max())
    exact = difference < 1e-4 and torch.equal(tokens, expected_tokens)
    position = small.seen_tokens == 47
    return {
        "outcome": "exact" if exact and position else "wrong",
        "difference": difference,
        "kept_rows": small.kept_rows,
        "class": type(model).__name__,
        "layers": sorted({type(layer).__name__ for layer in cache.layers}),
        "reason": "; ".join(small.notes),
    }


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    text = text.split("; kvfoundry serves")[0]
    return text if len(text) <= 220 else text[:217] + "..."


def _worker(model_type: str, connection: Any) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    connection.send(examine(model_type))


def isolated(model_type: str) -> dict[str, Any]:
    """`examine` in a process of its own: a type that hangs or dies costs only its own row."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_worker, args=(model_type, sender))
    process.start()
    row = receiver.recv() if receiver.poll(SECONDS) else {"outcome": "not tried", "reason": f"no answer in {SECONDS} s"}
    process.kill()
    process.join()
    return row


def table(rows: dict[str, dict[str, Any]], version: str) -> str:
    """The page docs/families.md."""
    counts = {
        outcome: sum(row["outcome"] == outcome for row in rows.values())
        for outcome in ("exact", "refused", "wrong", "failed", "not tried")
    }
    lines = [
        "# Model families",
        "",
        f"Made by `python benchmarks/families.py` with transformers {version}: every causal-LM type that a tiny config",
        "can build, with random weights, float32, a left-padded batch of two. *Exact*: logits within 1e-4 of the",
        "model's own eager attention and the same greedy tokens with the full cache, and an evicting method runs with",
        "positions that go on counting. *Refused*: one clear error, by name.",
        "",
        ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) + ".",
        "",
        "| model type | outcome | largest difference | note |",
        "|---|---|---|---|",
    ]
    for name, row in rows.items():
        difference = f"{row['difference']:.1e}" if "difference" in row else ""
        lines.append(f"| {name} | {row['outcome']} | {difference} | {row['reason'].replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # Imported once here, so that every forked worker starts warm.
    import kvfoundry.cache  # noqa: F401

    names = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    rows = {}
    for name in names:
        rows[name] = isolated(name)
        print(
            f"{name:32s} {rows[name]['outcome']:10s} {rows[name].get('difference', '')} {rows[name]['reason'][:150]}",
            flush=True,
        )
    if len(sys.argv) == 1:
        results = ROOT / "benchmarks" / "results"
        results.mkdir(parents=True, exist_ok=True)
        record = {"transformers": transformers.__version__, "rows": rows}
        (results / "families.json").write_text(json.dumps(record, indent=1) + "\n")
        (ROOT / "docs" / "families.md").write_text(table(rows, transformers.__version__))


if __name__ == "__main__":
    main()
