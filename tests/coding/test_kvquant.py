"""KVQuant in a model: keys before RoPE, frozen thresholds, calibration."""

from __future__ import annotations

import huggingface_hub
import pytest
import torch
from laws.support import forward_pieces
from tiny_models import build, random_ids

import kvfoundry
from kvfoundry.calibration import calibrate
from kvfoundry.cli import main
from kvfoundry.codecs.calibrated import Calibration
from kvfoundry.errors import DataError, SpecError, UnsupportedModelError
from kvfoundry.rope import Rope

from .support import assert_same_parts, feed, rows_of

TEXT = " ".join(f"w{3 + (7 * i * i + i) % 120}" for i in range(400))


def _spoilt(own_model):
    """A model with a large, constant part in some raw key channels, which RoPE turns into waves."""
    model = own_model("qwen2")
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[1::16] += 12.0
    return model


def _keys(model, spec, ids):
    cache = kvfoundry.KVCache(model, spec)
    forward_pieces(model, cache, ids, [ids.shape[1]])
    return torch.stack([layer.keys for layer in cache.attention_layers])


def test_keys_are_quantized_before_rope(own_model):
    """Where raw channels hold still and turned ones do not, the same bits lose much less."""
    model, ids = _spoilt(own_model), random_ids(1, 128)
    exact = _keys(model, "fullkv", ids)
    # The second layer sees what the first one lost; the first shows the codec alone.
    ours, kivi = (_keys(model, spec, ids)[0] for spec in ("kvquant(bits=4)", "kivi(bits=4, residual=0, group=32)"))
    lost = [float((keys - exact[0]).norm() / exact[0].norm()) for keys in (ours, kivi)]
    assert lost[0] < 0.6 * lost[1]


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_pieces_of_decode_write_what_the_whole_writes(family, tiny_model):
    rope, rows = Rope.of(tiny_model(family, head_dim=32), 0), rows_of(2, 150)
    first = feed("kvquant(bits=4, outliers=0.05)", rows, [60, 90], rope=rope)
    for pieces in ([60, *[1] * 90], [60, *[7] * 12, 6]):
        assert_same_parts(feed("kvquant(bits=4, outliers=0.05)", rows, pieces, rope=rope), first)
    assert float((first.keys - rows[1]).norm() / rows[1].norm()) < 0.12
    assert not torch.equal(
        first.rows.keys.rows["codes"], feed(str(first.method), rows, [60, 90]).rows.keys.rows["codes"]
    )


def test_rows_that_stay_after_eviction_are_turned_back_at_their_own_positions(own_model):
    model, ids = _spoilt(own_model), random_ids(1, 128)
    bare = _keys(model, "streamingllm(budget=60, sinks=2)", ids)[0]
    coded = _keys(model, "streamingllm(budget=60, sinks=2)+kvquant(bits=4)", ids)[0]
    assert float((coded - bare).norm() / bare.norm()) < 0.06


def test_decoded_tokens_are_screened_with_frozen_thresholds():
    """B44: stored exactly, billed as stored, and nothing that was settled moves."""
    rows, later = rows_of(1, 128), rows_of(1, 64, seed=1)
    layer = feed("kvquant(bits=3, outliers=0.02, first=0)", rows, [128])
    fixed = {name: tensor.clone() for name, tensor in layer.rows.keys.fixed.items()}
    later[1][0, 0, 5, 9] = 500.0
    later[1][0, 1, 6] = 400.0  # a whole row
    for at in range(64):
        layer.step(*[t[:, :, at : at + 1] for t in later])
    keys = layer.rows.keys
    assert int(keys.counts.min()) == 192
    assert layer.keys[0, 0, 133, 9] == 500.0 and bool((layer.keys[0, 1, 134] == 400.0).all())
    assert all(torch.equal(tensor, fixed[name]) for name, tensor in keys.fixed.items())
    counts = keys.sparse["outliers"].counts.view(2, 192)
    assert int(counts[1, 134]) == 32
    raw = torch.cat([rows[1], later[1]], 2)[0]
    outside = (raw < fixed["lower"][0][:, None]) | (raw > fixed["upper"][0][:, None])
    assert torch.equal(outside.sum(-1), counts.long())
    assert layer.nbytes == sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in layer.tensors()}.values()
    )
    before = int(outside[:, :128].sum())
    assert before == 2 * 32 * 2 * 2  # ceil(0.01 * 127) on either side of each of 64 channels


@pytest.mark.parametrize("prompt", [1, 3, 20])
def test_a_short_prompt_does_not_make_outliers_of_everything(prompt):
    rows = rows_of(1, 400, 64)
    layer = feed("kvquant(bits=3)", rows, [prompt, 400 - prompt])
    outliers = layer.rows.keys.sparse["outliers"].values.numel() / (2 * 400 * 64)
    assert outliers < 0.35 and layer.nbytes < 0.75 * feed("fullkv", rows, [400]).nbytes
    assert float((layer.keys - rows[1]).norm() / rows[1].norm()) < 0.5


@pytest.mark.parametrize(("spec", "most"), [("kvquant(bits=3)", 0.28), ("gear(bits=4, rank=4)", 0.45)])
def test_shares_of_bf16(spec, most):
    rows = rows_of(1, 4096, 128, dtype=torch.bfloat16)
    assert feed(spec, rows, [4096]).nbytes <= most * 2 * rows[1].numel() * 2


def test_frequencies_that_depend_on_the_length_are_refused():
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build("llama", rope_parameters=scaled)
    with pytest.raises(UnsupportedModelError, match="depend on the length"):
        forward_pieces(model, kvfoundry.KVCache(model, "kvquant"), random_ids(1, 8), [8])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("kvquant(bits=8)", "bits must be 2, 3 or 4"),
        ("kvquant(outliers=0.6)", "outliers"),
        ("kvquant(levels=even)", "levels must be one of"),
        ("kvquant(calibration='nowhere.safetensors')", "no calibration file"),
        ("rotate()+kvquant", "leave rotate out"),
    ],
)
def test_bad_specs_are_refused_in_one_line(spec, words):
    with pytest.raises(SpecError, match=words) as caught:
        kvfoundry.Method.parse(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fisher", [True, False])
def test_a_calibration_serves_its_model_and_no_other(fisher, own_model, tokenizer, tmp_path):
    model, path = own_model("llama"), tmp_path / "tables.safetensors"
    made = calibrate(model, tokenizer, TEXT, outliers=0.02, tokens=256, window=64, fisher=fisher, q_norm=True)
    made.save(path)
    read = Calibration.read(path)
    assert (read.model, read.outliers, read.q_norm) == (made.model, 0.02, True)
    for layer, other in zip(made.layers, read.layers, strict=True):
        assert torch.equal(layer.lower, other.lower) and torch.equal(layer.levels[3][1].code, other.levels[3][1].code)
    spec = f"kvquant(bits=4, outliers=0.02, q_norm=True, calibration={str(path)!r})"
    ids = random_ids(1, 150)
    cache = kvfoundry.KVCache(model, spec)
    forward_pieces(model, cache, ids, [50, *[1] * 100])
    layer = cache.layers[0]
    assert torch.equal(layer.rows.keys.fixed["upper"][0], made.layers[0].upper)
    assert torch.equal(layer.rows.values.fixed["code"][0, 1], made.layers[0].levels[4][1].code)
    exact = kvfoundry.KVCache(model)
    forward_pieces(model, exact, ids, [150])
    assert float((layer.keys - exact.layers[0].keys).norm() / layer.keys.norm()) < 0.2
    other = own_model("llama")
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    with pytest.raises(SpecError, match=r"another model \(weights"):
        kvfoundry.KVCache(other, spec)
    with pytest.raises(SpecError, match=r"another model \(family 'llama', here 'qwen3'"):
        kvfoundry.KVCache(own_model("qwen3"), spec)
    with pytest.raises(SpecError, match=r"is for outliers=0\.02, not outliers=0\.01"):
        kvfoundry.Method.parse(f"kvquant(q_norm=True, calibration={str(path)!r})")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(SpecError, match="damaged"):
        kvfoundry.Method.parse(spec)


def test_thresholds_are_percentiles_of_raw_keys(own_model, tokenizer):
    model = own_model("llama")
    made = calibrate(model, tokenizer, TEXT, outliers=0.1, tokens=128, window=128, fisher=False)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :128]
    cache = kvfoundry.KVCache(model)
    forward_pieces(model, cache, ids, [128])
    raw = Rope.of(model, 0).unrotate(cache.layers[0].keys, torch.arange(128).view(1, 1, -1))[0]
    assert torch.allclose(made.layers[0].upper, raw.quantile(0.95, dim=1), atol=1e-4)
    assert torch.allclose(made.layers[0].lower, raw.quantile(0.05, dim=1), atol=1e-4)


def test_a_short_text_is_refused(own_model, tokenizer):
    with pytest.raises(DataError, match="fewer than 2048"):
        calibrate(own_model("llama"), tokenizer, TEXT)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "nowhere/tables.safetensors"], "its folder does not exist"),
        (["--text", "nowhere.txt"], "cannot be read"),
        (["--model", "nowhere/model"], "nowhere/model"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_same_parts_cover_sparse_numbers():
    left, right = (feed("kvquant(bits=3)", rows_of(1, 80, seed=seed), [80]) for seed in (0, 1))
    with pytest.raises(AssertionError):
        assert_same_parts(left, right)
