"""Whose rows they are: every setting that decides is in the identity, and no other."""

from types import SimpleNamespace

import pytest
import torch

from kvfoundry.errors import StoreError
from kvfoundry.integrations.vllm.identity import served_identity, shard_name
from kvfoundry.integrations.vllm.settings import connector_settings
from kvfoundry.integrations.vllm.tenants import Tenants
from kvfoundry.integrations.vllm.weights import adapter_digest, checkpoint_folder, weights_digest

from .fakes import request

ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFOUNDRY_CACHE", str(tmp_path / "cache"))
    made = tmp_path / "model"
    made.mkdir()
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (made / "tokenizer.json").write_text("{}")
    return made


def config(folder, *, rope=ROPE, dtype=torch.bfloat16, longest=2048, cache_dtype="auto", quantization=None, **settings):
    held = {"model_type": "llama", "hidden_size": 64, "rope_parameters": rope, "_name_or_path": str(folder), **settings}
    model = SimpleNamespace(
        model=str(folder), revision=None, dtype=dtype, quantization=quantization, max_model_len=longest,
        hf_text_config=SimpleNamespace(to_dict=lambda: held),
    )  # fmt: skip
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        load_config=SimpleNamespace(download_dir=None, load_format="auto"),
    )


def parts(folder, shard="heads 0/1 layers 0/1", settings=None, **changed):
    told = connector_settings({"store": "host:1GiB", **(settings or {})})
    return served_identity(config(folder, **changed), told, shard).parts


def test_it_is_stable_and_knows_no_path(folder, tmp_path):
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in folder.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    assert parts(folder) == parts(folder) == parts(moved)


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": torch.float16},
        {"rope": {"rope_type": "linear", "factor": 2.0}},
        {"hidden_size": 65},
        {"cache_dtype": "fp8"},
        {"quantization": "fp8"},
        {"shard": shard_name(1, 2, 0, 1)},
        {"settings": {"namespace": "tenant"}},
        {"settings": {"method": "int8"}},
        {"settings": {"span": 512}},
    ],
)
def test_what_decides_is_in_it(folder, changed):
    assert parts(folder, **changed) != parts(folder)


def test_one_changed_bit_of_the_weights_is_another_model(folder):
    before = parts(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[5000] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(data))
    assert parts(folder) != before


def test_frequencies_that_depend_on_the_longest_text_tell_its_length(folder):
    long = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    assert parts(folder, rope=long, longest=4096) != parts(folder, rope=long)
    assert parts(folder, longest=4096) == parts(folder)


def test_files_are_read_once(folder, monkeypatch):
    first = weights_digest(folder)
    monkeypatch.setattr("kvfoundry.integrations.vllm.weights._fingerprint", lambda _: pytest.fail("read again"))
    assert weights_digest(folder) == first


def test_a_cache_folder_that_cannot_be_written_changes_nothing(folder, tmp_path, monkeypatch):
    first = weights_digest(folder)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVFOUNDRY_CACHE", str(tmp_path / "file"))
    assert weights_digest(folder) == first


def test_a_model_without_files_is_refused(tmp_path):
    with pytest.raises(StoreError, match="no weight files"):
        weights_digest(tmp_path)
    with pytest.raises(StoreError, match="not on this machine"):
        checkpoint_folder("nobody/has-this-model-0", download_dir=str(tmp_path))


def test_requests_whose_ids_do_not_say_what_was_read_are_not_served():
    lines = []
    tenants = Tenants(lines.append)
    assert tenants.of(request("a", 10)) is not None
    for changed in ({"mm_features": [1]}, {"prompt_embeds": 1}, {"prompt_token_ids": None}, {"resumable": True}):
        assert tenants.of(request("a", 10, **changed)) is None
    assert tenants.of(request("a", 10, mm_features=[1])) is None
    assert len(lines) == 2, "each reason is said once"


def test_adapters_are_told_apart_by_their_files(tmp_path):
    made = []
    for name, byte in (("one", 1), ("two", 2), ("same", 1)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(bytes([byte]) * 100)
        (folder / "adapter_config.json").write_text("{}")
        made.append(folder)
    one, two, same = (adapter_digest(folder) for folder in made)
    assert one == same != two
    lora = SimpleNamespace(lora_path=str(made[0]), lora_int_id=1, lora_name="one")
    lines = []
    assert Tenants(lines.append).of(request("a", 10, lora_request=lora)).adapter == one
    away = SimpleNamespace(lora_path=str(tmp_path / "away"), lora_int_id=1, lora_name="away")
    assert Tenants(lines.append).of(request("a", 10, lora_request=away)) is None and len(lines) == 1
