"""Published sizes of well-known models, so that there is something to plan and measure where no hub can be reached."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from kvfoundry.models import architecture

_LLAMA_3_1_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# Each call makes a config of its own.
KNOWN: dict[str, Callable[[], PretrainedConfig]] = {
    "llama-3.1-8b": lambda: LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_parameters=dict(_LLAMA_3_1_ROPE),
    ),
    "llama-3.1-70b": lambda: LlamaConfig(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
        intermediate_size=28672, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_parameters=dict(_LLAMA_3_1_ROPE),
    ),
    "qwen3-8b": lambda: Qwen3Config(
        hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=12288, vocab_size=151936, max_position_embeddings=40960,
    ),
    "gemma-3-27b": lambda: Gemma3TextConfig(
        hidden_size=5376, num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=16, head_dim=128,
        intermediate_size=21504, vocab_size=262208, sliding_window=1024, max_position_embeddings=131072,
    ),
    "gpt-oss-20b": lambda: GptOssConfig(num_hidden_layers=24, num_local_experts=32),
}  # fmt: skip


def outline_of(config: PretrainedConfig) -> PreTrainedModel:
    """The architecture of a config on torch's meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


def known_or_loaded(name: str) -> PreTrainedModel:
    """The outline of a well-known model, or of whatever `kvfoundry.load` would find under the name."""
    return outline_of(KNOWN[name]()) if name in KNOWN else architecture(name)
