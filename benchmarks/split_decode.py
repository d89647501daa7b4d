"""Decoding with a model that no single GPU holds: Llama-3.1-70B's shape over the visible GPUs, under several methods.

    python benchmarks/split_decode.py [--out benchmarks/results/split_decode.json] [--limit 150] [--arms full ...]

Weights are random, in bfloat16 (141 GB), and made where they stay; nothing is fetched, nothing goes through the
host. The layers lie in even shares, carried on by accelerate. First the logits of a split run through kvfoundry are
compared with those of transformers' cache on the same split model; where they differ the command exits with 1. Then
every arm reads a prompt in pieces and decodes greedily, in turn:

    ms_per_token   median over steps, every device waited for after each
    stored_bytes   what the layers on each device hold after the prompt; peak_bytes: the device's allocator, weights
                   included, from the arm's start on
    crossing       of one more step: bytes and copies from device to device, seen by torch's dispatcher

Beside the arms stand the rate of a large copy between the first two devices, and the time of a copy as large as the
hidden state of one token. The file is written after every figure; what does not fit into `--limit` seconds is left out
and named. `--tiny` runs it all on a toy, on the CPU where there is no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import dispatch_model, init_empty_weights
from record import OutOfTime, Record
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from kvfoundry import KVCache, attach, compat
from kvfoundry.layer_state import storage_bytes

RESULTS = Path(__file__).resolve().parent / "results" / "split_decode.json"
ARMS = {"full": "fullkv", "snapkv": "snapkv(budget=0.1)", "kivi": "kivi(bits=2)", "adakv": "adakv(budget=0.1)"}
# bfloat16 logits of the same rows read by two ways, relative to their norm
TOLERANCE = 3e-2
WARM = 3


@dataclass(frozen=True)
class Setting:
    """A model and the text that it decodes behind. gate: tokens of the comparison with transformers' cache."""

    config: LlamaConfig
    tokens: int
    piece: int
    new: int
    gate: int


def setting(tiny: bool) -> Setting:
    """Llama-3.1-70B, or a toy."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    if tiny:
        config = LlamaConfig(
            vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, rope_parameters=rope,
        )  # fmt: skip
        return Setting(config, 1024, 256, 8, 128)
    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rope_parameters=rope,
    )  # fmt: skip
    return Setting(config, 32768, 4096, 24, 1024)


def devices_there() -> list[torch.device]:
    found = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    return found or [torch.device("cpu")]


def wait(devices: list[torch.device]) -> None:
    """Return when every device has done what it was given."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@torch.no_grad()
def made(config: LlamaConfig, devices: list[torch.device]) -> PreTrainedModel:
    """The model with random weights, its layers in even shares on the devices, its end on the last."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    layers, last = config.num_hidden_layers, devices[-1]
    places: dict[str, Any] = {"model.embed_tokens": devices[0], "model.rotary_emb": devices[0]}
    places |= {f"model.layers.{number}": devices[number * len(devices) // layers] for number in range(layers)}
    places |= {"model.norm": last, "lm_head": last}
    for name, device in places.items():
        model.get_submodule(name).to_empty(device=device)
    # Its frequencies are computed, not stored, so an empty one would stay empty.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(devices[0])
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "layernorm.weight")):
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02)
    return dispatch_model(model, places, skip_keys=model._skip_keys_device_placement)


class Crossing(TorchDispatchMode):
    """Counts what goes from one device to another while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("to", "_to_copy", "copy_") and isinstance(result, Tensor):
            source = args[1] if name == "copy_" else args[0]
            if isinstance(source, Tensor) and source.device != result.device:
                way = f"{source.device} to {result.device}"
                self.bytes[way] += source.numel() * source.element_size()
                self.copies[way] += 1
        return result

    def found(self) -> dict[str, dict[str, int]]:
        return {way: {"bytes": self.bytes[way], "copies": self.copies[way]} for way in sorted(self.bytes)}


def links(devices: list[torch.device], hidden: int) -> list[dict[str, Any]]:
    """How fast the first two devices copy to each other: one gibibyte, and the hidden state of one token."""
    found = []
    for source, target in ((devices[0], devices[1]), (devices[1], devices[0])) if len(devices) > 1 else ():
        large = torch.empty(1 << 30, dtype=torch.uint8, device=source)
        small = torch.empty(hidden, dtype=torch.bfloat16, device=source)
        times: dict[str, float] = {}
        for name, tensor, rounds in (("large", large, 5), ("small", small, 50)):
            into = torch.empty_like(tensor, device=target)
            into.copy_(tensor)
            wait(devices)
            began = time.perf_counter()
            for _ in range(rounds):
                into.copy_(tensor)
            wait(devices)
            times[name] = (time.perf_counter() - began) / rounds
        found.append(
            {
                "way": f"{source} to {target}",
                "gigabytes_per_second": round(large.numel() / times["large"] / 1e9, 1),
                "microseconds_per_hidden_state": round(1e6 * times["small"], 1),
                "peer_access": torch.cuda.can_device_access_peer(source, target),
            }
        )
    return found


def text(tokens: int, vocabulary: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(vocabulary, (1, tokens), generator=generator).to(device)


def call(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """Logits [vocabulary] of the last token."""
    output = model(ids, use_cache=True, logits_to_keep=1, **{compat.CACHE_ARGUMENT: cache})
    logits: Tensor = output.logits[0, -1]
    return logits


def read(model: PreTrainedModel, cache: KVCache, ids: Tensor, piece: int, record: Record) -> Tensor:
    cache.expect_prompt(ids.shape[1])
    for part in ids.split(piece, dim=1):
        record.check_time()
        logits = call(model, part, cache)
    return logits


@torch.inference_mode()
def gated(model: PreTrainedModel, at: Setting, devices: list[torch.device], record: Record) -> bool:
    """Whether a prompt in pieces and a step say through kvfoundry what they say through transformers."""
    ids = text(at.gate + 1, at.config.vocab_size, devices[0])
    cache = DynamicCache(config=model.config)
    wanted = [call(model, part, cache).float() for part in (ids[:, :-1], ids[:, -1:])]
    with attach(model):
        cache = KVCache(model)
        found = [read(model, cache, ids[:, :-1], at.gate // 4, record).float(), call(model, ids[:, -1:], cache).float()]
        placed = all(
            {tensor.device for tensor in layer.tensors()} == {device}
            for layer, device in zip(cache.attention_layers, cache.devices(model), strict=True)
        )
    errors = [float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True)]
    right = record.gate("logits of transformers' cache", max(errors), TOLERANCE)
    return record.gate("layers whose rows are elsewhere", 0.0 if placed else 1.0, 0.0) and right


@torch.inference_mode()
def measured(
    model: PreTrainedModel, name: str, at: Setting, devices: list[torch.device], record: Record
) -> dict[str, Any]:
    """The figures of one arm."""
    gpus = [device for device in devices if device.type == "cuda"]
    for device in gpus:
        torch.cuda.reset_peak_memory_stats(device)
    ids = text(at.tokens, at.config.vocab_size, devices[0])
    with attach(model):
        cache = KVCache(model, ARMS[name])
        wait(devices)
        began = time.perf_counter()
        token = read(model, cache, ids, at.piece, record).argmax()[None, None]
        wait(devices)
        prompt_seconds = time.perf_counter() - began
        stored = {
            str(device): storage_bytes(
                tensor for layer in cache.attention_layers for tensor in layer.tensors() if tensor.device == device
            )
            for device in devices
        }
        kept, times = cache.kept_rows, []
        for _ in range(WARM + at.new):
            if len(times) > WARM + 4 and time.perf_counter() > record.deadline:
                break
            began = time.perf_counter()
            token = call(model, token, cache).argmax()[None, None]
            wait(devices)
            times.append(time.perf_counter() - began)
        peaks = {str(device): torch.cuda.max_memory_allocated(device) for device in gpus}
        with Crossing() as crossing:
            call(model, token, cache)
    times = times[WARM:]
    return {
        "arm": name,
        "method": str(cache.method),
        "prompt_tokens": at.tokens,
        "prompt_seconds": round(prompt_seconds, 2),
        "ms_per_token": round(1e3 * statistics.median(times), 3),
        "ms_range": [round(1e3 * min(times), 3), round(1e3 * max(times), 3)],
        "steps": len(times),
        "kept_rows": round(kept, 1),
        "stored_bytes": stored,
        "peak_bytes": peaks,
        "crossing": crossing.found(),
        "notes": cache.notes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--limit", type=float, default=150.0)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--tokens", type=int, help="of the prompt (default: 32768)")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    at, devices = setting(given.tiny), devices_there()
    if given.tokens is not None:
        at = Setting(at.config, given.tokens, at.piece, at.new, at.gate)
    record = Record(
        given.out, given.limit, transformers=transformers.__version__,
        devices=[torch.cuda.get_device_name(each) if each.type == "cuda" else "CPU" for each in devices],
        shape="tiny" if given.tiny else "Llama-3.1-70B", layers=at.config.num_hidden_layers, dtype="bfloat16",
        piece=at.piece,
    )  # fmt: skip
    began = time.perf_counter()
    model = made(at.config, devices)
    wait(devices)
    weights: Counter[str] = Counter()
    for parameter in model.parameters():
        weights[str(parameter.device)] += parameter.numel() * parameter.element_size()
    record.content |= {"weight_bytes": dict(weights), "weights_seconds": round(time.perf_counter() - began, 1)}
    record.note(f"weights of {sum(weights.values()) / 1e9:.3g} GB made on {', '.join(map(str, weights))}")
    record.content["links"] = links(devices, at.config.hidden_size)
    right = gated(model, at, devices, record)
    left = list(given.arms)
    try:
        while right and left:
            record.check_time()
            figure = measured(model, left[0], at, devices, record)
            record.content["figures"].append(figure)
            record.note(f"{left.pop(0)}: {figure['ms_per_token']} ms a token, prompt {figure['prompt_seconds']} s")
    except OutOfTime:
        record.note(f"left out for want of time: {', '.join(left)}")
    record.save()
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
