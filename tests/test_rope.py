"""Re-rotation of keys against the keys that the model itself stores (acceptance B15; positions of B14 and B21)."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from kvfoundry.errors import KVFoundryError, UnsupportedModelError
from kvfoundry.rope import Rope

TRAINED = 64
SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=97, max_position_embeddings=TRAINED, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def _scaled(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **more}}


# What the transformers library can do to a key: scaling rules, partial rotation, channel layouts, key norms.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", {}),
    "linear": ("llama", _scaled("linear", factor=4.0)),
    "dynamic": ("llama", _scaled("dynamic", factor=4.0)),
    "llama3": (
        "llama",
        _scaled(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=TRAINED,
        ),
    ),
    "yarn": ("llama", _scaled("yarn", factor=4.0, original_max_position_embeddings=TRAINED)),
    "longrope": (
        "phi3",
        dict(
            max_position_embeddings=4 * TRAINED,
            original_max_position_embeddings=TRAINED,
            **_scaled(
                "longrope",
                short_factor=[1.0 + 0.1 * i for i in range(8)],
                long_factor=[2.0 + 0.5 * i for i in range(8)],
                original_max_position_embeddings=TRAINED,
            ),
        ),
    ),
    "partial, sliced by the attention": ("phi", {}),
    "partial, sliced by the function": ("glm4_moe", {"num_experts_per_tok": 2, "n_routed_experts": 4}),
    "neighbours, tables repeated": ("cohere", {}),
    "neighbours, tables doubled": ("glm", {}),
    "neighbours, single tables": ("gptj", dict(n_embd=64, n_head=4, n_layer=1, rotary_dim=4, n_positions=256)),
    "halves, single tables": ("gpt_oss", {"num_local_experts": 4}),
    "complex tables": ("llama4_text", {"num_local_experts": 2}),
    "turns the other way": ("nanochat", {}),
    "key norm": ("qwen3", {}),
    "key norm over all heads": ("olmo2", {}),
}


def tiny(kind: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms start at one, which would hide a norm that does not commute with rotation
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def variant(name: str) -> PreTrainedModel:
    kind, changes = VARIANTS[name]
    try:
        model = tiny(kind, **changes)
    except (ValueError, KeyError) as error:
        pytest.skip(f"this transformers has no {kind}: {error}")
    if kind == "gptj" and not hasattr(model.transformer, "rotary_emb"):
        with pytest.raises(UnsupportedModelError):
            Rope.of(model)
        pytest.skip("in this transformers GPT-J keeps its tables inside the attention: refused")
    return model


@torch.no_grad()
def stored_keys(model: PreTrainedModel, positions: Tensor, layer_idx: int = 0) -> Tensor:
    """The keys [batch, heads, rows, head_dim] that the model itself caches for fixed tokens at [batch, rows]."""
    ids = 3 + torch.arange(positions.numel()).view(positions.shape) % 90
    cache = DynamicCache()
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    model(input_ids=ids, position_ids=positions, **{keyword: cache})
    keys = cache.layers[layer_idx].keys  # type: ignore[union-attr]
    assert isinstance(keys, Tensor)
    return keys


def rows(*starts: int, count: int = 7) -> Tensor:
    return torch.tensor(starts)[:, None] + torch.arange(count)


def longest(positions: Tensor) -> int:
    return int(positions.max()) + 1


@pytest.mark.parametrize("name", VARIANTS)
def test_b15_moved_key_equals_the_model_at_the_other_position(name: str) -> None:
    """B15: two rows of a batch at different positions, moved by different distances, forwards and backwards."""
    model = variant(name)
    rope = Rope.of(model)
    here, there = rows(3, 40), rows(30, 11)
    old, new = stored_keys(model, here), stored_keys(model, there)
    assert (old - new).abs().max() > 0.1
    moved = rope.move(old, here[:, None], there[:, None], length=longest(here), to_length=longest(there))
    torch.testing.assert_close(moved, new, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_b15_raw_key_rotated_equals_the_stored_key_and_round_trips(name: str) -> None:
    model = variant(name)
    rope = Rope.of(model)
    here, there = rows(3, 40), rows(21, 0)
    old = stored_keys(model, here)
    raw = rope.unrotate(old, here[:, None], length=longest(here))
    torch.testing.assert_close(rope.rotate(raw, here[:, None]), old, rtol=0, atol=1e-5)
    torch.testing.assert_close(rope.rotate(raw, there[:, None]), stored_keys(model, there), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["default", "yarn", "neighbours, tables repeated", "halves, single tables"])
def test_b15_positions_per_head(name: str) -> None:
    """After per-head eviction each head holds other tokens: positions are [batch, heads, rows]."""
    model = variant(name)
    rope = Rope.of(model)
    heads = stored_keys(model, rows(0)).shape[1]
    starts = [5 * head for head in range(heads)]
    here = torch.stack([rows(3), rows(9)]).transpose(0, 1)[:, :1].expand(1, heads, -1)
    wanted = torch.stack([stored_keys(model, rows(start))[:, head] for head, start in enumerate(starts)], dim=1)
    there = torch.stack([rows(start)[0] for start in starts])[None]
    torch.testing.assert_close(rope.move(stored_keys(model, rows(3)), here, there), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
@pytest.mark.parametrize("start, to_start", [(10, 30), (10, 100), (100, 10), (100, 130)])
def test_b15_frequencies_on_both_sides_of_the_switch(name: str, start: int, to_start: int) -> None:
    """Lengths below and above the trained one: the rows that carried the length may have been evicted since."""
    here, there = rows(start), rows(to_start)
    old, new = stored_keys(variant(name), here), stored_keys(variant(name), there)  # fresh models: no past to remember
    rope = Rope.of(variant(name))
    kept = torch.tensor([0, 2, 3])
    moved = rope.move(
        old[:, :, kept], here[:, None, kept], there[:, None, kept], length=longest(here), to_length=longest(there)
    )
    torch.testing.assert_close(moved, new[:, :, kept], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_length_is_asked_for_and_checked(name: str) -> None:
    model = variant(name)
    rope = Rope.of(model)
    here = rows(100)
    old = stored_keys(model, here)
    with pytest.raises(KVFoundryError, match="pass length="):
        rope.unrotate(old, here[:, None])
    with pytest.raises(KVFoundryError, match="does not cover position 106"):
        rope.unrotate(old, here[:, None], length=106)
    # The same row at the same position is another key when the text around it is short.
    at = torch.full((1, 1, 7), 9)
    assert (rope.move(old, at, at, length=107, to_length=10) - old).abs().max() > 1e-3


@pytest.mark.parametrize("name", VARIANTS)
def test_b15_zero_distance_changes_no_bit_and_zero_rows_pass(name: str) -> None:
    model = variant(name)
    rope = Rope.of(model)
    here = rows(3, 40)[:, None]
    old = stored_keys(model, here[:, 0])
    same = rope.move(old, here, here, length=longest(here), to_length=longest(here))
    assert torch.equal(same, old)
    none = old[:, :, :0]
    assert rope.move(none, here[..., :0], here[..., :0]).shape == none.shape
    assert rope.rotate(none, here[..., :0]).shape == rope.unrotate(none, here[..., :0]).shape == none.shape


@pytest.mark.parametrize("name", VARIANTS)
def test_b15_bfloat16_stays_within_its_rounding(name: str) -> None:
    model = variant(name)
    here, there = rows(3, 40), rows(30, 11)
    wanted = stored_keys(model, there)
    old = stored_keys(model, here).bfloat16()
    rope = Rope.of(model)
    moved = rope.move(old, here[:, None], there[:, None], length=longest(here), to_length=longest(there))
    assert moved.dtype == torch.bfloat16
    torch.testing.assert_close(moved.float(), wanted, rtol=0, atol=1e-2 * float(wanted.abs().max()))
    Rope.of(model.bfloat16())  # the probe finds the layout in half precision too


@pytest.mark.parametrize("name", ["default", "dynamic", "longrope"])
def test_nothing_is_left_on_the_model(name: str) -> None:
    """B07 for rotations: buffers, attributes and the next logits are what they were, also after a far move."""
    model = variant(name)
    before = {key: value.clone() for key, value in model.named_buffers()}
    attributes = copy.deepcopy({k: v for k, v in vars(model.model.rotary_emb).items() if not k.startswith("_")})
    rope = Rope.of(model)
    keys = torch.randn(1, 2, 3, 16)
    rope.move(keys, rows(0, count=3)[:, None], rows(500, count=3)[:, None], length=3, to_length=600)
    assert dict(model.named_buffers()).keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.named_buffers())
    after = {k: v for k, v in vars(model.model.rotary_emb).items() if not k.startswith("_")}
    assert str(after) == str(attributes)


def test_probe_leaves_the_random_generator_alone() -> None:
    model = variant("default")
    torch.manual_seed(7)
    wanted = torch.randn(3)
    torch.manual_seed(7)
    Rope.of(model)
    assert torch.equal(torch.randn(3), wanted)


def test_b15_layers_with_bases_of_their_own() -> None:
    """Gemma3: sliding layers turn with another base than full ones; Rope.of without a layer must not pick one."""
    model = tiny("gemma3_text", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(UnsupportedModelError, match="rotate differently"):
        Rope.of(model)
    here, there = rows(3), rows(30)
    # The first layer's raw keys do not depend on positions; for the second, layer order is swapped in a second model.
    first = Rope.of(model, 0).move(stored_keys(model, here), here[:, None], there[:, None])
    torch.testing.assert_close(first, stored_keys(model, there), rtol=0, atol=1e-4)
    swapped = tiny("gemma3_text", num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])
    full = Rope.of(model, 1).move(stored_keys(swapped, here), here[:, None], there[:, None])
    torch.testing.assert_close(full, stored_keys(swapped, there), rtol=0, atol=1e-4)
    wrong = Rope.of(model, 0).move(stored_keys(swapped, here), here[:, None], there[:, None])
    assert (wrong - full).abs().max() > 1e-2


def test_layers_that_do_not_rotate_pass_through() -> None:
    """Cohere2 rotates its sliding layers only."""
    model = tiny("cohere2", num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])
    keys, here = torch.randn(1, 2, 7, 16), rows(3)[:, None]
    assert torch.equal(Rope.of(model, 0).move(keys, here, here + 9), keys)
    assert not torch.equal(Rope.of(model, 1).move(keys, here, here + 9), keys)


@pytest.mark.parametrize(
    "kind, changes, cause",
    [
        ("gpt2", {"n_embd": 64, "n_head": 8, "n_layer": 1}, "no attention"),
        ("bloom", {"n_layer": 1, "n_head": 8}, "no attention"),
        ("hunyuan_v1_dense", {"attention_bias": False, **_scaled("default")}, "not a plain rotation"),
        (
            "deepseek_v3",
            dict(kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16, head_dim=8,
                 n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, num_key_value_heads=8),
            "",
        ),
    ],
)  # fmt: skip
def test_models_that_cannot_be_re_rotated_are_refused(kind: str, changes: dict[str, Any], cause: str) -> None:
    """No RoPE; a learned norm after the rotation; latent attention. Never keys that look right and are not."""
    model = tiny(kind, **changes)
    if kind == "deepseek_v3":
        try:  # older releases cache whole keys, which can be moved; newer ones cache the latent, which cannot
            rope = Rope.of(model)
        except UnsupportedModelError as error:
            assert "beside the keys" in str(error)
            return
        here, there = rows(3), rows(30)
        moved = rope.move(stored_keys(model, here), here[:, None], there[:, None])
        torch.testing.assert_close(moved, stored_keys(model, there), rtol=0, atol=1e-4)
        return
    with pytest.raises(UnsupportedModelError, match=f"cannot re-rotate .*{cause}"):
        Rope.of(model)


def test_shapes_that_do_not_fit_are_refused() -> None:
    rope = Rope.of(variant("default"))
    with pytest.raises(KVFoundryError, match="do not fit"):
        rope.rotate(torch.randn(1, 2, 7, 16), rows(3))
    with pytest.raises(KVFoundryError, match="do not fit"):
        rope.move(torch.randn(1, 2, 7, 16), rows(3)[:, None], rows(3, count=6)[:, None])
