"""Whose rows are they, in a vLLM server: what of its settings decides keys and values, as an `Identity` of the store.

As with `Identity.of` a hit compares every part. Rows of kvfoundry's own caches have other parts and are never mixed
with these. Left out is what does not decide: attention back end, block size, memory, host, day, path of the checkpoint.
"""

from __future__ import annotations

import json
from typing import Any

from kvfoundry.chunks import Identity
from kvfoundry.chunks.identity import _IDLE_SETTINGS, digest
from kvfoundry.integrations.vllm.settings import ConnectorSettings
from kvfoundry.integrations.vllm.weights import checkpoint_folder, tokenizer_files_digest, weights_digest

FORMAT = "kvfoundry-vllm-1"

# RoPE kinds whose frequencies vLLM chooses by the longest text that it is to serve.
_BY_LENGTH = ("longrope", "su", "dynamic")


def served_identity(vllm_config: Any, settings: ConnectorSettings, shard: str) -> Identity:
    """The identity of what one worker stores. shard: which part of the model it holds, as `shard_name` gives it.

    Reads the checkpoint's files once per machine. StoreError when they are not there.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    folder = checkpoint_folder(model.model, model.revision, vllm_config.load_config.download_dir)
    config = model.hf_text_config.to_dict()
    return Identity(
        {
            "format": FORMAT,
            "namespace": settings.namespace,
            "weights": weights_digest(folder),
            "load": str(getattr(vllm_config.load_config, "load_format", "")),
            "settings": digest(_canonical({k: v for k, v in config.items() if k not in _IDLE_SETTINGS}).encode()),
            "rope": _canonical(_rope(config, model.max_model_len)),
            "dtype": str(model.dtype).removeprefix("torch."),
            "cache_dtype": str(cache.cache_dtype),
            "quantization": str(model.quantization),
            "revision": model.revision or "",
            "tokenizer": tokenizer_files_digest(folder),
            "adapter": "",
            "salt": "",
            "shard": shard,
            "method": settings.method,
            "span": str(settings.span),
        }
    )


def shard_name(tensor_rank: int, tensor_size: int, pipeline_rank: int, pipeline_size: int) -> str:
    """Which part of the heads and of the layers a worker holds."""
    return f"heads {tensor_rank}/{tensor_size} layers {pipeline_rank}/{pipeline_size}"


def _rope(config: dict[str, Any], longest: int) -> dict[str, Any]:
    """What decides the rotation. Entries of servers with other lengths differ where the frequencies may."""
    named = {name: value for name, value in config.items() if "rope" in name or "rotary" in name}
    by_length = any(kind in _canonical(named) for kind in _BY_LENGTH)
    return named | ({"longest": longest} if by_length else {})


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
