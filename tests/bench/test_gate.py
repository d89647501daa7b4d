"""The gates pass what is right, and find what is wrong in the prompt and in the engine."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import _COMMON, FAMILIES, HEAD_DIM, KV_HEADS, random_ids
from transformers import Gemma3TextConfig

from kvfoundry import KVCache, Method, compat
from kvfoundry.bench import gate, random_weights
from kvfoundry.bench.gate import check, engine_error, in_float32
from kvfoundry.bench.memory import read_bytes
from kvfoundry.bench.random_rows import of_method
from kvfoundry.bench.random_weights import built, config_of, shallow
from kvfoundry.bench.record import OutOfTime, Record
from kvfoundry.engine.attention import TorchKernels
from kvfoundry.errors import DataError, ModelLoadError
from kvfoundry.planning.geometry import geometry


@pytest.fixture
def record(tmp_path):
    return Record(tmp_path / "bench.json", 100.0, say=lambda text: None)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(
    "spec", ["fullkv", "snapkv(budget=24, window=8)", "h2o(budget=24, window=8)", "kivi(group=16)"]
)
def test_what_is_right_passes(record, tiny_model, family, spec):
    assert check(record, tiny_model(family), Method.parse(spec), None, 64, engine=True)
    assert len(record.content["gates"]) == 2 and record.wrong == []


def test_a_fault_of_the_engine_is_found(record, tiny_model, monkeypatch):
    right = TorchKernels._attend
    monkeypatch.setattr(TorchKernels, "_attend", lambda *given: right(*given) * 1.01)
    assert not check(record, tiny_model("llama"), Method.parse("fullkv"), None, 64, engine=True)
    assert record.wrong == ["fullkv: logits of 4 steps of the engine"]
    assert check(record, tiny_model("llama"), Method.parse("fullkv"), None, 64, engine=False)


def test_a_fault_in_the_prompt_is_found_and_nothing_else_is_tried(record, tiny_model, monkeypatch):
    right = gate._own_logits
    monkeypatch.setattr(gate, "_own_logits", lambda *given: right(*given) * 1.001)
    assert not check(record, tiny_model("llama"), Method.parse("fullkv"), None, 64, engine=True)
    assert list(record.content["gates"]) == ["fullkv: logits of the prompt"]


def test_a_number_that_is_none_is_wrong(record, tiny_model, monkeypatch):
    assert not record.gate("nothing", float("nan"), 1.0) and record.content["gates"]["nothing"]["error"] == "nan"
    attend = TorchKernels._attend
    monkeypatch.setattr(TorchKernels, "_attend", lambda *given: attend(*given) * float("nan"))
    model, ids = tiny_model("llama"), random_ids(1, 33)
    cache = KVCache(model)
    with torch.inference_mode():
        model(ids[:, :-1], use_cache=True, **{compat.CACHE_ARGUMENT: cache})
        error = engine_error(model, cache, cache.fork(), ids)
    assert error != error


def test_a_narrow_model_is_compared_in_float32_on_its_first_layers():
    model = built(FAMILIES["qwen3"](**{**_COMMON, "num_hidden_layers": 6}), torch.bfloat16, torch.device("cpu"))
    small = in_float32(model)
    assert small.dtype == torch.float32 and len(small.model.layers) == 4 and small.config.hidden_size == 64
    assert in_float32(small) is small


def test_so_many_layers_stay_that_two_see_the_whole_past():
    config = Gemma3TextConfig(**{**_COMMON, "num_hidden_layers": 14}, sliding_window=16)  # every sixth sees all
    small = shallow(config, 4)
    assert small.num_hidden_layers == 12 == len(small.layer_types) and config.num_hidden_layers == 14
    assert small.layer_types == config.layer_types[:12]
    built(small, torch.float32, torch.device("cpu"))


def test_random_weights_have_no_end_and_are_refused_where_they_do_not_fit(tmp_path, monkeypatch):
    config = FAMILIES["llama"](**{**_COMMON, "eos_token_id": 5})
    config.save_pretrained(tmp_path)
    model = built(config_of(str(tmp_path)), torch.float16, torch.device("cpu"))
    assert model.dtype == torch.float16 and model.generation_config.eos_token_id is None
    assert config_of(str(tmp_path / "config.json")).hidden_size == 64
    (tmp_path / "other.json").write_text((tmp_path / "config.json").read_text())
    assert config_of(str(tmp_path / "other.json")).hidden_size == 64
    (tmp_path / "other.json").write_text('{"model_type": "nothing that there is"}')
    with pytest.raises(ModelLoadError, match=r"config file .*other\.json' cannot be read"):
        config_of(str(tmp_path / "other.json"))
    again = built(config, torch.float16, torch.device("cpu"))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
    monkeypatch.setattr(random_weights, "_free_bytes", lambda device: 1000)
    with pytest.raises(DataError, match=r"cpu has 0\.0 GB; give a smaller config"):
        built(config, torch.float16, torch.device("cpu"))
    with pytest.raises(ModelLoadError, match=r"did you mean .llama-3\.1-8b."):
        config_of("llama-3.1-8bn")


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        ("fullkv", 2 * 96),
        ("snapkv(budget=32, window=8)", 2 * 32),
        ("adakv(budget=32, window=8)", 2 * 32),
        ("quest(budget=32, page=8, skip_layers=1)", 96 + 32 + 12),  # pages of the second layer, and a bound for each
    ],
)
def test_bytes_that_a_step_reads(tiny_model, spec, rows):
    model, ids = tiny_model("llama"), random_ids(3, 96)
    cache = KVCache(model, spec)
    with torch.inference_mode():
        model(ids, use_cache=True, **{compat.CACHE_ARGUMENT: cache})
    assert read_bytes(cache, geometry(model), 4) == 3 * rows * KV_HEADS * 2 * HEAD_DIM * 4


@pytest.mark.parametrize(
    ("spec", "lengths"),
    [("fullkv", [96] * 4), ("snapkv(budget=0.25, window=8)", [24] * 4), ("pyramidkv(budget=32, window=8)", None)],
)
def test_random_rows_are_as_many_as_a_prompt_leaves(tiny_model, spec, lengths):
    model, ids = tiny_model("llama"), random_ids(3, 96)
    cache = KVCache(model, spec)
    with torch.inference_mode():
        model(ids, use_cache=True, **{compat.CACHE_ARGUMENT: cache})
    made = of_method(model, Method.parse(spec), geometry(model), 3, 96)
    for layer, other in zip(cache.attention_layers, made.attention_layers, strict=True):
        assert torch.equal(layer.lengths, other.lengths)
    assert lengths is None or [int(n) for layer in made.attention_layers for n in layer.lengths[0]] == lengths
    assert made.seen_tokens == 96


def test_random_rows_of_uneven_heads_keep_the_budget(tiny_model):
    made = of_method(
        tiny_model("llama"), Method.parse("adakv(budget=24, window=8)"), geometry(tiny_model("llama")), 3, 96
    )
    for layer in made.attention_layers:
        assert layer.lengths.sum(dim=1).tolist() == [48] * 3 and int(layer.lengths.max()) > 24


def test_codes_are_read_as_they_are_stored(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 512)
    cache = KVCache(model, "int4")
    with torch.inference_mode():
        model(ids, use_cache=True, **{compat.CACHE_ARGUMENT: cache})
    assert read_bytes(cache, geometry(model), 4) == cache.nbytes < 512 * 2 * KV_HEADS * 2 * HEAD_DIM * 4 / 3


def test_the_record_is_on_the_disk_after_every_word(tmp_path):
    record = Record(tmp_path / "new" / "bench.json", 0.0, say=lambda text: None, command="this", device="there")
    record.note("first")
    record.gate("second", 1.0, 2.0)
    written = json.loads(record.path.read_text())
    assert (written["command"], written["device"], written["notes"]) == ("this", "there", ["first"])
    assert written["gates"] == {"second": {"error": 1.0, "passed": True}}
    with pytest.raises(OutOfTime):
        record.check_time()
