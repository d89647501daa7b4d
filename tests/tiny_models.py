"""Tiny random models of nine families: 2 layers, 8 query heads over 2 KV heads of size 16, float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 128
QUERY_HEADS, KV_HEADS, HEAD_DIM, LAYERS, WINDOW = 8, 2, 16, 2, 16
PAD, FIRST_WORD = 0, 3

# Weights are larger than at a usual start of training, so that attention is peaked and a wrong row shows.
_COMMON: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=QUERY_HEADS,
    num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=VOCABULARY, max_position_embeddings=1024,
    pad_token_id=PAD, bos_token_id=1, eos_token_id=None, initializer_range=0.15,
)  # fmt: skip
_HYBRID = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": lambda **sizes: MistralConfig(sliding_window=WINDOW, **sizes),
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma2": lambda **sizes: Gemma2Config(sliding_window=WINDOW, layer_types=_HYBRID, **sizes),
    "gemma3": lambda **sizes: Gemma3TextConfig(sliding_window=WINDOW, layer_types=_HYBRID, **sizes),
    "mixtral": lambda **sizes: MixtralConfig(num_local_experts=4, **sizes),
    "phi3": Phi3Config,
    "gpt_oss": lambda **sizes: GptOssConfig(
        num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, layer_types=_HYBRID, **sizes
    ),
}

# Families in which a method has at least one full-attention layer to act on.
EVICTABLE = [family for family in FAMILIES if family != "mistral"]


def build(family: str, **sizes: Any) -> PreTrainedModel:
    """A model of the family with seeded random weights, under its own eager attention. `sizes` override the config."""
    config = FAMILIES[family](**{**_COMMON, **sizes})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word: w3 ... w127 are the ids 3 to 127."""
    words = {"<pad>": PAD, "<bos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(FIRST_WORD, VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", unk_token="<unk>", padding_side="left"
    )


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Seeded token ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_WORD, VOCABULARY, shape, generator=generator)


def left_padded(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of a left-padded batch with rows of these lengths: [batch, longest] each."""
    ids = random_ids(len(lengths), max(lengths), seed=seed)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = PAD
        mask[row, : max(lengths) - length] = 0
    return ids, mask
