"""Blending under every way to scale a rotary embedding, also where frequencies depend on the length of the prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import random_ids
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvfoundry.blend import blend_chunks
from kvfoundry.blend.check import require_exact
from kvfoundry.errors import UnsupportedModelError

from .support import asked, full_logits, passages, read_all

TRAINED = 64
SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=128, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.15,
)  # fmt: skip


def _scaled(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **more}}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", _scaled("linear", factor=4.0)),
    "llama3": (
        "llama",
        _scaled(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=TRAINED
        ),
    ),
    "yarn": ("llama", _scaled("yarn", factor=4.0, original_max_position_embeddings=TRAINED)),
    "dynamic": ("llama", _scaled("dynamic", factor=4.0)),
    "longrope": (
        "phi3",
        {
            **_scaled(
                "longrope",
                short_factor=[1.0 + 0.1 * i for i in range(8)],
                long_factor=[2.0 + 0.5 * i for i in range(8)],
                original_max_position_embeddings=TRAINED,
            ),
            "original_max_position_embeddings": TRAINED,
        },
    ),
    "partial": ("phi", {}),
    "some layers without": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
}


def build(name: str) -> PreTrainedModel:
    family, more = VARIANTS[name]
    limit = TRAINED if name == "dynamic" else 4 * TRAINED
    config = AutoConfig.for_model(family, **{**SIZES, "max_position_embeddings": limit, **more})
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("lengths", [(12, 9, 14), (25, 20, 15)], ids=["short", "long with its question only"])
def test_ratio_one_is_full_prefill(name: str, lengths: tuple[int, ...]) -> None:
    """The longer prompt passes the trained length by its question: its context must be read under that length too."""
    model, parts, question = build(name), passages(lengths), random_ids(8, seed=99)
    wanted = full_logits(build(name), torch.cat([*parts, question]), 8)
    chunks = read_all(model, parts)
    blended = blend_chunks(model, [chunks], [question], blend="blend(ratio=1.0)")
    torch.testing.assert_close(asked(model, blended)[0], wanted, rtol=0.0, atol=1e-4)
    if name not in ("dynamic", "longrope"):  # there the first passage, too, was read under other frequencies
        later = (sum(lengths[1:]) + 0.5) / sum(lengths)
        spec = f"blend(ratio={later}, select=first_k_per_chunk)"
        blended = blend_chunks(model, [chunks], [question], blend=spec)
        torch.testing.assert_close(asked(model, blended)[0], wanted, rtol=0.0, atol=1e-4)
    assert blended.exact == [0 if name in ("dynamic", "longrope") else lengths[0]]


def test_models_whose_rows_cannot_move_are_refused_by_name() -> None:
    """Learned positions are not RoPE; a recurrent state belongs to one text from its start."""
    small = dict(vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    opt = AutoConfig.for_model(
        "opt", vocab_size=128, hidden_size=32, ffn_dim=64, word_embed_proj_dim=32, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    lfm2 = AutoConfig.for_model("lfm2", **small, intermediate_size=64, layer_types=["conv", "full_attention"])
    for config, cause in ((opt, "OPTForCausalLM.*not RoPE|no attention"), (lfm2, "Lfm2ForCausalLM.*recurrent-state")):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with pytest.raises(UnsupportedModelError, match=cause):
            require_exact(model)
