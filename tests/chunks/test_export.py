"""A chunk as a folder of keys, values, valid mask and metadata: written, readable by any tool, and read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import random_ids
from transformers import PreTrainedModel

from kvfoundry.chunks import Identity
from kvfoundry.chunks.export import load_folder, save_folder
from kvfoundry.chunks.passage import read_passage
from kvfoundry.errors import CacheStateError, DataError

from .support import same

Models = Callable[..., PreTrainedModel]
CASES = [
    ("llama", "fullkv"), ("llama", "l2norm(budget=10, skip_layers=0)"), ("llama", "adakv(budget=20, window=8)"),
    ("gemma3", "fullkv"), ("gemma3", "keydiff(budget=10)"),
    ("llama", "snapkv(budget=20, window=8, granularity='query_head')"),
]  # fmt: skip


@pytest.mark.parametrize("family, method", CASES, ids=[" ".join(case) for case in CASES])
def test_written_and_read_back(family: str, method: str, tiny_model: Models, tmp_path: Path) -> None:
    ids = random_ids(1, 120)[0]
    chunk = read_passage(tiny_model(family), ids, method, context_ids=[1])
    who = Identity.of(tiny_model(family), method=method)
    folder = save_folder(chunk, tmp_path / "chunk", identity=who.parts)
    assert sorted(path.name for path in folder.iterdir()) == [
        "keys.safetensors", "metadata.json", "valid_mask.safetensors", "values.safetensors"
    ]  # fmt: skip
    keys, values, mask = (load_file(folder / f"{name}.safetensors") for name in ("keys", "values", "valid_mask"))
    about = json.loads((folder / "metadata.json").read_text())
    assert about["token_ids"] == ids.tolist() and about["context_ids"] == [1] and about["method"] == method
    assert about["identity"] == dict(who.parts)
    for number, layer in enumerate(chunk.layers):
        rows, name = layer.rows(), str(number)
        assert keys[name].shape[:2] == values[name].shape[:2] == mask[name].shape == (len(layer.lengths), len(ids))
        assert torch.equal(mask[name].sum(-1), layer.lengths)
        for head, positions in enumerate(rows.head_positions[0]):
            kept = positions[positions >= 0].long()
            assert torch.equal(mask[name][head].nonzero()[:, 0], kept)
            assert torch.equal(keys[name][head, kept], rows.keys[0, head, : len(kept)])
            assert torch.equal(values[name][head, kept], rows.values[0, head, : len(kept)])
    assert same(load_folder(folder), chunk)


def test_compressed_chunks_are_exported_as_they_are_read(tiny_model: Models, tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), random_ids(1, 60)[0]
    chunk = read_passage(model, ids, "kivi(bits=2, group=8, residual=8)")
    with pytest.raises(CacheStateError, match="plain"):
        save_folder(chunk, tmp_path / "x")
    read = load_folder(save_folder(chunk.plain(model), tmp_path / "chunk"))
    assert torch.equal(read.layers[0].keys, chunk.plain(model).layers[0].keys)


def test_odd_folders_are_one_sentence(tiny_model: Models, tmp_path: Path) -> None:
    chunk = read_passage(tiny_model("llama"), random_ids(1, 20)[0])
    with pytest.raises(DataError, match="cannot be read"):
        load_folder(tmp_path / "nothing")
    with pytest.raises(DataError, match="not empty"):
        save_folder(chunk, save_folder(chunk, tmp_path / "full"))
    changes = [
        lambda folder: (folder / "metadata.json").write_text("{"),
        lambda folder: (folder / "metadata.json").write_text("[]"),
        lambda folder: (folder / "metadata.json").write_text('{"format": "pickle"}'),
        lambda folder: (folder / "keys.safetensors").unlink(),
        lambda folder: (folder / "keys.safetensors").write_bytes((folder / "values.safetensors").read_bytes()),
        lambda folder: _edited(folder, "token_ids", ["rm -rf"]),
        lambda folder: _edited(folder, "token_ids", [1, 2]),
        lambda folder: _edited(folder, "layers", [{"heads": "two"}] * 2),
        lambda folder: _edited(folder, "layers", [{"heads": 2}] * 9),
        lambda folder: _edited(folder, "dtype", "load"),
    ]
    for number, change in enumerate(changes):
        folder = save_folder(chunk, tmp_path / str(number))
        change(folder)
        with pytest.raises(DataError) as refused:
            load_folder(folder)
        assert "\n" not in str(refused.value)


def _edited(folder: Path, name: str, value: object) -> None:
    about = json.loads((folder / "metadata.json").read_text())
    (folder / "metadata.json").write_text(json.dumps(about | {name: value}))


def test_a_mask_of_another_shape_is_refused(tiny_model: Models, tmp_path: Path) -> None:
    import zlib

    folder = save_folder(read_passage(tiny_model("llama"), random_ids(1, 20)[0]), tmp_path / "chunk")
    path = folder / "valid_mask.safetensors"
    save_file({str(n): torch.ones(2, 19, dtype=torch.bool) for n in range(2)}, path)
    _edited(folder, "checksums", {
        each.name: zlib.crc32(each.read_bytes()) for each in folder.glob("*.safetensors")
    })  # fmt: skip
    with pytest.raises(DataError, match="no chunk"):
        load_folder(folder)
