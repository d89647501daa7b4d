"""The plan and its command: what fits agrees with the meter, and bad input is one line."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import _COMMON, FAMILIES
from transformers import DeepseekV3Config

from kvfoundry.cli import main
from kvfoundry.errors import DataError, ModelLoadError
from kvfoundry.models import architecture
from kvfoundry.planning import Memory, Meter, plan
from kvfoundry.planning.plan import _GRID, _largest

MIB = 2**20


@pytest.fixture
def folder(tmp_path):
    """A folder with nothing but the config of a model of 6 layers in bfloat16; its positions are 8,192."""
    config = FAMILIES["qwen3"](**{**_COMMON, "num_hidden_layers": 6, "max_position_embeddings": 8192})
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("spec", ["fullkv", "snapkv(budget=256)", "int4", "kivi(bits=2)"])
def test_what_fits_fits_and_more_does_not(folder, spec):
    outline = architecture(folder)
    weights = sum(parameter.numel() for parameter in outline.parameters()) * 2
    made = plan(
        folder, device=Memory("tiny", weights + 5 * MIB), headroom=0.0, methods=[spec], context=512, chunk_tokens=100
    )
    (line,), meter = made.methods, Meter(outline, spec, torch.bfloat16)
    size = meter.size(512)
    assert made.weight_bytes == weights and made.dtype == "bfloat16" and line.cache_bytes == size.stored
    assert line.sequences * size.stored + size.peak - size.stored <= made.room_bytes
    assert (line.sequences + 1) * size.stored + size.peak - size.stored > made.room_bytes
    chunk = meter.chunk_bytes(100)
    assert line.chunks == made.room_bytes // chunk and line.chunk_bytes == chunk and line.tokens == 512 * line.sequences
    assert meter.size(line.largest_context).peak <= made.room_bytes
    assert line.largest_context == 8192 or meter.size(line.largest_context + _GRID).peak > made.room_bytes
    assert line.fits is (size.peak <= made.room_bytes)


@pytest.mark.parametrize("limit", [1000, 10**6])
@pytest.mark.parametrize(
    "peak",
    [lambda n: 7 * n, lambda n: 5000 + n // 32 * 40, lambda n: 300 + 100 * n**2, lambda n: 2 * min(n, 400) + n // 9],
)
def test_the_largest_context_is_found(peak, limit):
    for room in (10, 400, 6000, 90_000):
        found = _largest(peak, room, limit)
        assert (found == 0 and peak(1) > room) or peak(found) <= room
        assert found == limit or peak(min(limit, found + _GRID)) > room or (found == 0 and peak(1) > room)


def test_a_batch_and_a_device_that_is_too_small(folder):
    one, four = (
        plan(folder, device=Memory("tiny", 20 * MIB), methods=["fullkv"], context=256, batch=n) for n in (1, 4)
    )
    assert four.methods[0].cache_bytes == 4 * one.methods[0].cache_bytes
    assert four.methods[0].largest_context < one.methods[0].largest_context
    none = plan(folder, device=Memory("tiny", MIB // 8), methods=["fullkv"], context=256)
    assert none.room_bytes == 0 and not none.methods[0].fits and none.methods[0].largest_context == 0
    assert none.methods[0].chunks == none.methods[0].sequences == 0 and "larger than the device" in none.remarks[0]


def test_every_method_is_planned_or_left_out_with_a_reason(folder):
    made = plan(folder / "config.json", device=Memory("tiny", 40 * MIB), context=300, chunk_tokens=64)
    names = {line.method.partition("(")[0] for line in made.methods} | set(made.left_out)
    assert {"fullkv", "kivi", "kvquant", "gear", "think", "quest", "kvzip", "h2o", "minicache", "int2"} <= names
    assert all(line.cache_bytes <= made.methods[0].cache_bytes for line in made.methods)


def test_on_the_cpu_weights_are_in_float32(folder):
    made = plan(folder, device=Memory("CPU", 40 * MIB, on_gpu=False), methods=["fullkv"], context=64)
    assert made.dtype == "float32" and made.weight_bytes == 4 * made.parameters


def test_values_that_cannot_be(folder):
    for bad in (
        {"context": 0},
        {"context": 9000},
        {"batch": 0},
        {"chunk_tokens": 0},
        {"headroom": 1.0},
        {"dtype": "int3"},
    ):
        with pytest.raises(DataError):
            plan(folder, device=Memory("tiny", 40 * MIB), **bad)
    with pytest.raises(ModelLoadError):
        plan(folder / "nothing", device=Memory("tiny", MIB))


def test_the_command(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    base = ["plan", "--model", str(folder), "--method", "fullkv", "--method", "snapkv", "--budget", "64"]
    assert main([*base, "--gpu", "40MiB", "--context", "300", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [line["method"] for line in told["methods"]] == ["fullkv", "snapkv(budget=64)"]
    assert told["device_bytes"] == 40 * MIB and told["positions"] == 8192
    assert main([*base, "--gpu", "4090", "--chunk-tokens", "128"]) == 2
    assert main([*base, "--gpu", "rtx 4090", "--chunk-tokens", "128"]) == 0
    table = capsys.readouterr().out
    assert "snapkv(budget=64)" in table and "8,192*" in table and "24 GiB" in table
    assert main([*base, "--gpu", "100kB", "--context", "300"]) == 1


@pytest.mark.parametrize(
    "given",
    [["--gpu", "rtx9999"], ["--gpu", "0GiB"], ["--dtype", "int3"], ["--context", "0"], ["--method", "snap(budget=3)"],
     ["--method", "snapkv(budget=0)"], ["--weights", "heavy"], ["--headroom", "2"], ["--budget", "1,2"],
     ["--model", "./no"], ["--gpu", "4090"]],
)  # fmt: skip
def test_bad_input_is_one_line(folder, given, capsys):
    assert main(["plan", "--model", str(folder), "--gpu", "1GiB", "--method", "fullkv", *given]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("error: ") and told.err.strip().count("\n") == 0


def test_latent_attention_is_refused_by_name(tmp_path, capsys):
    DeepseekV3Config(num_hidden_layers=2).save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), "--gpu", "h100"]) == 2
    assert "multi-head latent attention (MLA" in (told := capsys.readouterr().err) and "deepseek_v3" in told
