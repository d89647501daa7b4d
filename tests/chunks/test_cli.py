"""`kvfoundry store`: what it prints, what it removes, and one line for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvfoundry.chunks import ChunkStore
from kvfoundry.cli import main

from .support import chunk_for, key_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "kv"
    with ChunkStore(f"disk:{root}:10MiB") as store:
        for number, space in enumerate(("", "docs", "docs")):
            store.put(key_of(number, namespace=space), chunk_for(key_of(number, namespace=space)))
    return root


def test_ls_and_stats(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "ls", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("fullkv") == 3 and key_of(0).id[:12] in printed
    assert main(["store", "ls", f"disk:{folder}", "--namespace", "docs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["disk"]
    assert {each["id"] for each in listed} == {key_of(n, namespace="docs").id for n in (1, 2)}
    assert main(["store", "stats", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["disk"]["entries"] == 3
    assert main(["store", "stats", str(folder)]) == 0 and "3 entries, 24 tokens" in capsys.readouterr().out


def test_verify_and_clear(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "verify", str(folder)]) == 0 and "3 entries are sound" in capsys.readouterr().out
    next(folder.rglob("chunk.safetensors")).write_bytes(b"x")
    assert main(["store", "verify", str(folder), "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)
    assert problem["tier"] == "disk" and "1 bytes instead of" in problem["reason"]
    next(folder.rglob("chunk.safetensors")).write_bytes(b"x")
    assert main(["store", "verify", str(folder)]) == 1 and "instead of" in capsys.readouterr().out
    assert main(["store", "verify", str(folder)]) == 0
    assert main(["store", "clear", str(folder)]) == 0 and "1 entries removed" in capsys.readouterr().out
    assert not list(folder.rglob("*.safetensors"))


def test_looking_changes_no_size(folder: Path) -> None:
    """A size in the address of `ls` does not evict."""
    assert main(["store", "ls", f"disk:{folder}:20kB"]) == 0
    assert len(list(folder.rglob("*.safetensors"))) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "/no/such/folder"], ["ls", "disk:/no/such/folder"], ["stats", "host:1GB"], ["verify", "tape:1"],
        ["clear", "redis://:secret@localhost/0"], ["ls", "/etc"], ["ls", ""], ["ls"], ["nothing"],
        ["ls", "redis://127.0.0.1:1/0?timeout=0.2"],
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and "Traceback" not in printed.err and "secret" not in printed.err
    assert not Path("/no/such").exists() and not Path("/etc/chunks").exists()
