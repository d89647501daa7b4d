"""What codecs promise: errors, bytes, shapes, and that attention never decodes the whole cache."""

from __future__ import annotations

import warnings

import pytest
import torch
from tiny_models import random_ids
from torch.utils._python_dispatch import TorchDispatchMode

import kvfoundry
from kvfoundry.codecs.packing import pack, packed_bytes, unpack
from kvfoundry.codecs.rotation import Rotation, rotation_matrix
from kvfoundry.coding import LossyCodecWarning
from kvfoundry.errors import DataError, SpecError
from kvfoundry.kernels import coded_attention
from kvfoundry.kernels.attention import naive
from kvfoundry.layouts.base import Reading
from kvfoundry.method import Method

from .support import SPECS, feed, rows_of

# Spec, and how much of the norm of standard normal rows it may lose under groups of up to 256.
CODECS = {
    "int8(group={g})": 0.02,
    "int4(group={g})": 0.14,
    "int2(group={g}, mode=symmetric_full)": 0.75,
    "int4(group={g}, mode=zero_point, keys=tokens)": 0.14,
    "fp8(group={g})": 0.04,
    "fp8": 0.04,
    "kivi(bits=2, group={g}, residual=32)": 0.7,
    "kivi(bits=4, group={g}, residual=128, flow=paper)": 0.14,
    "rotate()+int4(group={g})": 0.14,
    "gear(bits=4, group={g})": 0.12,
    "gear(bits=3, rank=2, block={g})": 0.25,
    "kvquant(bits=3)": 0.25,
    "kvquant(bits=2, outliers=0.02)": 0.45,
}


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dim", [64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("spec", CODECS)
def test_every_head_size_with_every_group(spec, dim, group):
    """B45: a valid grouping is chosen; what is read is what was stored, within half a step of the coarsest group."""
    rows = rows_of(1, 300, dim)
    layer = feed(spec.format(g=group), rows, [299, 1])
    assert int(layer.rows.keys.counts.min()) >= 128 and int(layer.rows.values.counts.min()) >= 128
    for stored, exact in ((layer.keys, rows[1]), (layer.values, rows[2])):
        assert stored.shape == exact.shape and float((stored - exact).norm() / exact.norm()) < CODECS[spec]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 8, 72])
def test_packing_is_reversible_and_fills_bytes_from_the_lowest_bits(bits, count):
    codes = torch.randint(0, 2**bits, (3, 5, count), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, 5, packed_bytes(count, bits)) and torch.equal(unpack(packed, bits, count), codes)
    assert int(pack(torch.tensor([1, 0, 3], dtype=torch.uint8), 2)) == 0b110001
    assert pack(torch.tensor([1, 2, 7], dtype=torch.uint8), 3).tolist() == [0b11010001, 1] and packed_bytes(8, 3) == 3


@pytest.mark.parametrize("spec", ["kivi(bits=4, residual=0)", "int4(keys=tokens)"])
def test_a_channel_that_is_100_times_larger_spoils_only_itself(spec):
    """B40: per channel, the error is half a step of the channel's own range."""
    rows = rows_of(1, 256, 64)
    rows[1][..., 7] *= 100
    layer = feed(spec, rows, [256])
    error = (layer.keys - rows[1]).abs()
    blocks = rows[1].unflatten(2, (8, 32))
    span = (blocks.amax(3) - blocks.amin(3)).repeat_interleave(32, dim=2)
    assert bool((error <= span / 15 * 0.5 + 1e-5).all())


def test_a_rotation_shares_the_burden_of_an_outlier_channel():
    rows = rows_of(1, 256, 64)
    rows[1][..., 7] += 100.0  # as the biases of some models do: large and nearly constant
    exact = rows[0][:, :, -16:] @ rows[1].repeat_interleave(2, 1).transpose(2, 3)
    errors = {}
    for spec in ("int4", "rotate()+int4", "kivi(bits=4, residual=0)"):
        keys = feed(spec, rows, [256]).keys.repeat_interleave(2, 1)
        change = rows[0][:, :, -16:] @ keys.transpose(2, 3) - exact
        errors[spec] = float((change - change.mean(-1, keepdim=True)).norm())
    assert errors["rotate()+int4"] < 0.9 * errors["int4"] and errors["kivi(bits=4, residual=0)"] < 0.2 * errors["int4"]


@pytest.mark.parametrize("dim", [1, 6, 64, 72, 80, 96, 128, 256])
def test_a_rotation_is_orthogonal_mixes_all_channels_and_keeps_logits(dim):
    matrix = rotation_matrix(dim)
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim), atol=1e-5)
    query, key = torch.randn(5, dim), torch.randn(9, dim)
    turned = Rotation()
    assert torch.allclose(turned.turn(query) @ turned.turn(key).T, query @ key.T, atol=1e-4)
    assert torch.allclose(turned.turn_back(turned.turn(key)), key, atol=1e-5)
    # one channel reaches every output channel, with at most sqrt(2 / dim) of its size
    assert float(matrix.abs().max()) <= (2 / dim) ** 0.5 + 1e-6


@pytest.mark.parametrize(
    "spec", ["kivi(bits=2, group=16, residual=32)", "kivi(bits=2, group=16, residual=32, flow=paper)"]
)
def test_the_whole_rows_stay_bounded_and_bytes_grow_at_the_low_rate(spec):
    """B41: 300 tokens decoded one by one."""
    rows = rows_of(1, 301)
    layer, sizes, full = feed(spec, [t[:, :, :1] for t in rows], [1]), [], 32 + 16
    for at in range(1, 301):
        layer.step(*[t[:, :, at : at + 1] for t in rows])
        assert int(layer.rows.full_rows.max()) <= full
        sizes.append(layer.nbytes)
    whole = feed("fullkv", rows, [301])
    per_token = (sizes[-1] - sizes[99]) / 200
    # fp32 tables: 2 bits + two scales of 32 bits per 16 numbers, of 32 bits
    assert per_token < 0.25 * whole.nbytes / 301


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [None, 32])
def test_8_bit_floats_hold_large_keys(dtype, group):
    """B47: keys up to 600 in size."""
    rows = [t.to(dtype) for t in rows_of(1, 64, 64)]
    rows[1] *= 600 / rows[1].abs().max()
    layer = feed(f"fp8(group={group})", rows, [64])
    exact, stored = rows[1].float(), layer.keys.float()
    assert bool(torch.isfinite(stored).all())
    # e4m3: half a unit of 3 mantissa bits, and half the smallest step beside the largest number
    slack = 2**-8 if dtype == torch.bfloat16 else 0.0
    assert bool(((stored - exact).abs() <= exact.abs() * (2**-4 + slack) + 600 / 448 * 2**-10).all())


def share(spec: str, tokens: int = 4096, dim: int = 128) -> float:
    """Bytes of one layer of 8 heads in bfloat16 over those of its keys and values."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 8, tokens, dim, generator=generator).bfloat16() for _ in range(3))
    layer = Method.parse(spec).compress(query[:, :, -1:].expand(-1, -1, tokens, -1), key, value)
    return layer.nbytes / (2 * key.numel() * 2)


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        ("kivi(bits=2, group=32, residual=128)", 0.22),
        ("kivi(bits=2, group=64, residual=128)", 0.19),
        ("kivi(bits=4, group=32, residual=128)", 0.34),
        ("int8", 0.63),
        ("int8(mode=symmetric)", 0.57),
        ("int4", 0.38),
        ("int2", 0.26),
        ("fp8", 0.52),
        ("snapkv(budget=0.2)+kivi(bits=2)", 0.045 + 128 / 4096),
    ],
)
def test_shares_of_bf16_at_4096_tokens(spec, most):
    assert share(spec) <= most


class Largest(TorchDispatchMode):
    """The largest new floating-point tensor of 16 bits or more, in numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point() and result.element_size() > 1:
            known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
            if result.untyped_storage().data_ptr() not in known:
                self.numbers = max(self.numbers, result.untyped_storage().nbytes() // result.element_size())
        return result


@pytest.mark.parametrize("spec", SPECS)
def test_attention_never_holds_the_whole_cache_in_full(spec):
    tokens = 4096
    layer = feed(spec, rows_of(1, tokens), [tokens])
    query = rows_of(1, 1, seed=1)[0]
    with Largest() as largest:
        layer.rows.attend(query, torch.tensor([[tokens]]), Reading(naive.attend, 32**-0.5))
    assert 0 < largest.numbers <= 2 * 32 * 512 < 2 * 32 * tokens / 4


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    "spec",
    [
        "kivi(bits=4, group=16, residual=32)",
        "rotate()+int8(group=16)",
        "gear(bits=4, block=16, rank=2)",
        "kvquant(bits=3, outliers=0.1)",
    ],
)
def test_tiles_combine_to_what_one_softmax_gives(spec, queries, sinks, softcap, monkeypatch):
    """Against the naive kernel over decoded rows: batch rows and heads of unequal lengths, small tiles."""
    monkeypatch.setattr(
        coded_attention.naive.attend, "__kwdefaults__", {**coded_attention.naive.attend.__kwdefaults__, "tile": 48}
    )
    layer = feed(f"adakv(budget=90, window=8, floor=0.1)+{spec}", rows_of(2, 120), [120])
    for at in range(queries):
        layer.step(*rows_of(2, 1, seed=at + 5))
    query = rows_of(2, queries, seed=4)[0]
    positions = torch.arange(120, 120 + queries).expand(2, -1)
    logits = torch.randn(4) if sinks else None
    reading = Reading(naive.attend, 0.2, softcap, logits)
    view = layer.rows.view()
    visibility = reading.visibility(positions, view.positions, own=False, complete=False)
    expected = naive.attend(query, view.keys, view.values, visibility, scaling=0.2, softcap=softcap, sinks=logits)
    assert torch.allclose(layer.rows.attend(query, positions, reading), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("kivi(bits=3)", "bits must be one of 1, 2, 4, 8"),
        ("kivi(group=1)", "group"),
        ("kivi(residual=-1)", "residual"),
        ("kivi(flow=paper, residual=100)", "multiple of the group"),
        ("int4(mode=best)", "mode must be one of"),
        ("int4(keys=rows)", "keys must be one of"),
        ("fullkv+rotate", "add a codec"),
        ("int4+int8", "both set codec"),
        ("streamingllm(budget=8, positions=slot)+int4", "slot positions"),
        ("cam(budget=40)+int4", "merge in the prompt"),
    ],
)
def test_bad_specs_are_refused_in_one_line(spec, words):
    with pytest.raises(SpecError, match=words) as caught:
        Method.parse(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_refused_before_the_first_token(which, number):
    rows = rows_of(1, 40)
    rows[which][0, 0, 3, 2] = number
    with pytest.raises(DataError, match=r"layer 0 are not finite.*int4"):
        feed("int4", rows, [40])


def test_pruned_channels_that_the_prompt_needs_are_named(own_model):
    """The same figure for keys that lose channels: with one channel in sixteen hardly anything is left of a key."""
    model, ids = own_model("llama"), random_ids(1, 90)
    cache = kvfoundry.KVCache(model, "think(ratio=0.9, window=8, recent=8)")
    with pytest.warns(LossyCodecWarning, match=r"% of their spread .*a lower ratio"), torch.no_grad():
        model(ids, past_key_values=cache)
    # All channels but those that both sides leave at nothing.
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data.view(-1, 16, model.config.hidden_size)[:, [3, 11]] = 0.0
    fine = kvfoundry.KVCache(model, "think(ratio=0.125, window=8, recent=8)")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", LossyCodecWarning)
        model(ids, past_key_values=fine)
    assert max(fine.prompt.losses.by_layer.values()) < 1e-5


def test_a_model_whose_key_channels_do_not_suit_a_codec_is_named_once(own_model):
    """B40: a warning with the measured figure, and the same sentence in the notes."""
    model, ids = own_model("qwen2"), random_ids(1, 90)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[7::16] += 400.0  # the slowest channel of RoPE: nearly constant
    cache = kvfoundry.KVCache(model, "int4(group=16)")
    with pytest.warns(LossyCodecWarning, match=r"layer \d by \d+% of their spread") as caught, torch.no_grad():
        model(ids, past_key_values=cache)
    assert len([each for each in caught if each.category is LossyCodecWarning]) == 1
    assert any("int4" in note and "% of their spread" in note for note in cache.notes)
    cache.reset()
    assert not any("spread" in note for note in cache.notes)
    fine = kvfoundry.KVCache(model, "kivi(bits=8, group=16, residual=0)")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", LossyCodecWarning)
        model(ids, past_key_values=fine)
    assert fine.notes == [] and fine.prompt.losses.by_layer


@pytest.mark.parametrize("spec", ["kvzip(budget=0.5)+int4(group=8)", "kvzip(budget=0.5)+kivi(group=8, residual=8)"])
def test_a_reconstructed_prompt_is_written_after_the_second_pass(spec, tiny_model, tokenizer):
    prompt = " ".join(f"w{3 + 7 * i % 120}" for i in range(200))
    found = kvfoundry.generate(tiny_model("llama"), tokenizer, prompt, spec, max_new_tokens=4, details=True)
    bare = kvfoundry.generate(
        tiny_model("llama"), tokenizer, prompt, spec.split("+")[0], max_new_tokens=4, details=True
    )
    assert found.kept_rows == bare.kept_rows and found.stored_bytes < 0.75 * bare.stored_bytes
