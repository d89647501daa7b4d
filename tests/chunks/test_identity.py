"""Stored KV has a full identity, stable everywhere, and a hit compares what it stands for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import build, build_tokenizer, random_ids
from torch import nn
from transformers import PreTrainedModel

import kvfoundry
from kvfoundry.calibration import identity_of
from kvfoundry.chunks import ChunkStore, Identity, Report
from kvfoundry.chunks import identity as identity_module
from kvfoundry.chunks.identity import encoded, tokenizer_digest
from kvfoundry.chunks.passage import read_passage
from kvfoundry.errors import DataError, StoreError
from kvfoundry.fingerprint import fingerprint, weights_of

from .support import chunk_for, identity, key_of, same

Models = Callable[..., PreTrainedModel]


class Adapted(nn.Module):
    """A linear layer under an adapter, with the attributes by which PEFT's layers tell their state."""

    def __init__(self, base: nn.Module, name: str, seed: int, scale: float = 1.0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base_layer = base
        self.lora_B = nn.ParameterDict({name: nn.Parameter(torch.randn(base.out_features, 2, generator=generator) / 9)})
        self.lora_A = nn.ParameterDict({name: nn.Parameter(torch.randn(2, base.in_features, generator=generator) / 9)})
        self.active_adapters, self.merged_adapters, self.disable_adapters = [name], [], False
        self.scaling = {name: scale}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        for name in [] if self.disable_adapters else self.active_adapters:
            out = out + self.scaling[name] * (x @ self.lora_A[name].T @ self.lora_B[name].T)
        return out


def adapted(model: PreTrainedModel, name: str, seed: int, **options: float) -> PreTrainedModel:
    attention = model.model.layers[0].self_attn
    attention.v_proj = Adapted(attention.v_proj, name, seed, **options)
    return model


def test_B65_adapters_never_share_chunks(own_model: Models, tmp_path: Path) -> None:
    """Base, adapter A, adapter B, a renamed B, a scaled and a switched-off one: each is a miss for the others."""
    models = {
        "base": own_model("llama"),
        "a": adapted(own_model("llama"), "a", 1),
        "b": adapted(own_model("llama"), "b", 2),
        "b renamed": adapted(own_model("llama"), "c", 2),
        "b scaled": adapted(own_model("llama"), "b", 2, scale=2.0),
        "b off": adapted(own_model("llama"), "b", 2),
    }
    models["b off"].model.layers[0].self_attn.v_proj.disable_adapters = True
    ids = random_ids(1, 20)[0]
    with ChunkStore(f"host:1MiB,disk:{tmp_path / 'kv'}:10MiB") as store:
        for model in models.values():
            key = Identity.of(model).key(ids)
            assert store.get(key) is None
            store.put(key, read_passage(model, ids))
        for model in models.values():
            assert same(store.get(Identity.of(model).key(ids)), read_passage(model, ids))
    base = Identity.of(models["base"]).parts
    assert Identity.of(models["base"], adapter="x").parts != base != Identity.of(models["base"], adapter="y").parts


def test_B67_one_changed_weight_misses_everything(own_model: Models, tmp_path: Path) -> None:
    """Same name, same shapes, one number changed: disk and remote entries of the one are misses for the other."""
    model, ids = own_model("llama"), random_ids(1, 20)[0]
    spec = f"disk:{tmp_path / 'kv'}:10MiB,file://{tmp_path / 'remote'}?size=10MiB"
    before = Identity.of(model)
    chunk = read_passage(model, ids)
    with ChunkStore(spec) as store:
        assert store.put(before.key(ids), chunk) == ["disk", "file"]
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-3
    with ChunkStore(spec) as store:
        assert store.get(Identity.of(model).key(ids)) is None
        assert same(store.get(before.key(ids)), chunk)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w[0, 0].mul_(1.01), lambda w: w.neg_(), lambda w: w[:2].neg_(), lambda w: w[0, :2].neg_(),
        lambda w: w.copy_(w.flip(0)), lambda w: w.copy_(w.flip(1)), lambda w: w[1].zero_(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_change_of_a_tensor_shows(change: Callable[[torch.Tensor], Any], dtype: torch.dtype) -> None:
    weight = torch.randn(130, 67 * 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    changed = weight.clone()
    change(changed)
    assert not torch.equal(weight, changed) and fingerprint([("w", weight)]) != fingerprint([("w", changed)])
    for twin in (weight.clone(), weight.T.contiguous().T, torch.cat([weight, weight])[130:]):
        assert fingerprint([("w", weight)]) == fingerprint([("w", twin)])
    assert fingerprint([("w", weight)]) != fingerprint([("v", weight)])
    assert fingerprint([("w", weight)]) != fingerprint([("w", weight.reshape(-1))])


def test_the_calibration_identity_is_the_same_in_every_dtype(own_model: Models) -> None:
    model = own_model("llama").to(torch.bfloat16)
    halved = identity_of(model)
    assert identity_of(model.float()) == halved
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] += 1
    assert identity_of(model) != halved


def test_B68_effective_settings_are_part_of_it(tmp_path: Path) -> None:
    """fp16 against bf16, RoPE factor 1 against 2, another method or codec setting: all are misses."""

    def rope(factor: float) -> dict[str, Any]:
        return {"rope_parameters": {"rope_type": "linear", "factor": factor, "rope_theta": 1e4}}

    ids = random_ids(1, 40)[0]
    variants = {
        "fp16": (build("llama").to(torch.float16), "fullkv"),
        "bf16": (build("llama").to(torch.bfloat16), "fullkv"),
        "rope 1": (build("llama", **rope(1.0)), "fullkv"),
        "rope 2": (build("llama", **rope(2.0)), "fullkv"),
        "l2norm 16": (build("llama"), "l2norm(budget=16)"),
        "l2norm 17": (build("llama"), "l2norm(budget=17)"),
        "int8": (build("llama"), "int8"),
        "int4": (build("llama"), "int4"),
    }
    made = {}
    with ChunkStore(f"disk:{tmp_path / 'kv'}:10MiB") as store:
        for name, (model, method) in variants.items():
            key = Identity.of(model, method=method).key(ids)
            assert store.get(key) is None, name
            made[name] = (key, read_passage(model, ids, method))
            store.put(*made[name])
        for key, chunk in made.values():
            assert same(store.get(key), chunk)


def test_what_a_method_holds_counts_not_only_its_name(own_model: Models, tmp_path: Path) -> None:
    """A head table or a calibration of the same file name with other contents is another method."""
    table = tmp_path / "table.json"
    parts = []
    for score in (1.0, 2.0):
        table.write_text("{" + ", ".join(f'"{i}-{h}": {score if h else 1.0}' for i in range(2) for h in range(2)) + "}")
        spec = f"headkv(budget=24, window=8, table={str(table)!r})"
        parts.append(Identity.of(own_model("llama"), method=spec).parts)
    assert parts[0]["method"] == parts[1]["method"] and parts[0]["recipe"] != parts[1]["recipe"]


def test_what_does_not_decide_is_left_out(own_model: Models, tiny_model: Models, tmp_path: Path) -> None:
    """Path of the checkpoint, attention backend, padding and truncation of the tokenizer, and being attached."""
    tokenizer = build_tokenizer()
    model = own_model("llama")
    first = Identity.of(model, tokenizer).parts
    model.save_pretrained(tmp_path / "copy")
    tokenizer(["w3 w4", "w5"], padding=True, truncation=True, max_length=7)
    copy, _ = kvfoundry.load(tmp_path / "copy", tokenizer=False, attn_implementation="sdpa", device="cpu")
    kvfoundry.attach(copy)
    assert Identity.of(copy, tokenizer).parts == first
    other = build_tokenizer()
    other.add_tokens(["w999"])
    assert tokenizer_digest(other) != tokenizer_digest(tokenizer)


def test_B70_a_hash_that_collides_is_a_miss(
    tiny_model: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every id is the same: token ids and identity are compared, and the answer equals that without a store."""
    monkeypatch.setattr(identity_module, "digest", lambda data: "ab" * 32)
    model = tiny_model("llama")
    one, other = random_ids(1, 20, seed=1)[0], random_ids(1, 20, seed=2)[0]
    for spec in ("host:1MiB", f"disk:{tmp_path / 'kv'}:10MiB", f"file://{tmp_path / 'files'}", "device:1MiB,host:1MiB"):
        with ChunkStore(spec) as store:
            mine = Identity.of(model)
            store.put(mine.key(one), read_passage(model, one))
            report = Report()
            assert store.get(mine.key(other), report=report) is None
            assert store.promote(mine.key(other), report=report).result() is None
            assert report.tokens == 0 and report.missed_tokens == 40
            assert store.get(Identity.of(model, namespace="b").key(one)) is None
            fetched = store.fetch(mine.key(other), lambda: read_passage(model, other))
            assert same(fetched, read_passage(model, other))
            assert same(store.get(mine.key(other)), fetched)  # it took the place of the first
            assert store.get(mine.key(one)) is None


def test_B71_keys_are_the_same_in_another_process(tiny_model: Models, tmp_path: Path) -> None:
    """B71, B75, B85: written in one process, found in another with another hash seed, another day and another path."""
    build("llama").save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    script = (
        "import sys, time, torch, kvfoundry\n"
        "from kvfoundry.chunks.passage import read_passage\n"
        "time.time = lambda: 4e9\n"
        "model, tokenizer = kvfoundry.load(sys.argv[1], device='cpu')\n"
        "ids = tokenizer('w5 w9 w33 w7 w120')['input_ids']\n"
        "key = kvfoundry.Identity.of(model, tokenizer, 'int8', namespace='docs').key(ids)\n"
        "with kvfoundry.ChunkStore(sys.argv[2]) as store:\n"
        "    store.put(key, read_passage(model, ids, 'int8'))\n"
        "print(key.id)\n"
    )
    spec = f"disk:{tmp_path / 'kv'}:10MiB"
    environment = {**os.environ, "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "1", "TZ": "Asia/Tokyo"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model"), spec],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (tmp_path / "model").rename(tmp_path / "moved")
    model, tokenizer = kvfoundry.load(tmp_path / "moved", device="cpu")
    ids = tokenizer("w5 w9 w33 w7 w120")["input_ids"]
    key = Identity.of(model, tokenizer, "int8", namespace="docs").key(ids)
    assert key.id == done.stdout.strip()
    with ChunkStore(spec) as store:
        assert same(store.get(key), read_passage(model, ids, "int8"))
        assert store.get(Identity.of(model, tokenizer, "int8").key(ids)) is None  # another namespace


texts = st.text(max_size=6)


@given(st.dictionaries(texts, texts | st.binary(max_size=6), max_size=4), st.dictionaries(texts, texts, max_size=4))
def test_the_encoding_is_unambiguous(one: dict[str, str | bytes], other: dict[str, str]) -> None:
    plain = {name: value.encode() if isinstance(value, str) else value for name, value in one.items()}
    assert (encoded(one) == encoded(other)) == (plain == {name: value.encode() for name, value in other.items()})


@pytest.mark.parametrize("name", list(identity().parts))
def test_every_part_tells_entries_apart(name: str) -> None:
    mine, other = key_of(1), key_of(1, **{name: "z"})
    assert mine.id != other.id
    assert not mine.matches(other.identity.parts, chunk_for(mine)) and mine.matches(
        mine.identity.parts, chunk_for(mine)
    )


def test_a_chunk_that_names_another_method_than_its_identity_is_no_hit() -> None:
    """What a store says of a chunk is never parsed unless it is what was asked for."""
    key, odd = key_of(1), key_of(1, method="kvquant(calibration='/tmp/x')")
    assert not key.matches(key.identity.parts, chunk_for(odd))


def test_tokens_and_context_are_kept_apart() -> None:
    who = identity()
    keys = [who.key([1, 2, 3]), who.key([2, 3], context_ids=[1]), who.key([1, 2], context_ids=[3]), who.key([1, 2])]
    assert len({key.id for key in keys}) == 4


def test_refusals(own_model: Models) -> None:
    with pytest.raises(DataError, match="without tokens"):
        identity().key([])
    for name in ("a\nb", "x" * 300, 7):
        with pytest.raises(StoreError, match="printable text"):
            Identity.of(own_model("llama"), namespace=name)
    with torch.device("meta"):
        empty = build("llama")
    with pytest.raises(StoreError, match="meta device"):
        Identity.of(empty)
    with ChunkStore("host:1MiB") as store:
        for key in (key_of(2), key_of(1, method="int8"), key_of(1, dtype="float16")):
            with pytest.raises(DataError, match="names"):
                store.put(key, chunk_for(key_of(1)))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_weights_that_wait_on_the_host_are_those_of_the_model(family: str, own_model: Models) -> None:
    model = own_model(family)
    whole = Identity.of(model).parts
    aside = cpu_offload(model, execution_device=torch.device("cpu"))
    assert next(aside.parameters()).device.type == "meta"
    assert Identity.of(aside).parts == whole


def test_every_weight_is_read(tiny_model: Models) -> None:
    model = tiny_model("gpt_oss")
    names = {name for name, _ in weights_of(model)}
    assert {name for name, _ in model.named_parameters()} <= names
