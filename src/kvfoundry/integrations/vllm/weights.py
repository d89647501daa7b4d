"""The weights that a server loads, told apart by their bytes: every file of a checkpoint is read once and remembered.

vLLM fuses, splits and quantizes what it loads and does not show the result, so the files are what is asked: equal files
under equal settings are equal weights. A file counts as known while its size, inode and times of change are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from filelock import FileLock

from kvfoundry.chunks.identity import digest
from kvfoundry.errors import StoreError
from kvfoundry.fingerprint import fingerprint
from kvfoundry.wheels import cache_folder

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tekken.json", "added_tokens.json")


def checkpoint_folder(model: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Where the files of a folder, a file or a hub name lie; StoreError when they are nowhere on this machine."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except (OSError, ValueError) as error:
        raise StoreError(
            f"the files of {model!r} are not on this machine, so its rows cannot be told apart."
        ) from error


def weights_digest(folder: Path) -> str:
    """Of the names and bytes of all weight files of a checkpoint; StoreError when it has none."""
    found = [folder] if folder.is_file() else sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
    if not found:
        raise StoreError(f"{folder.name} holds no weight files, so its rows cannot be told apart.")
    return digest(json.dumps([[path.name, _remembered(path)] for path in found]).encode())


def tokenizer_files_digest(folder: Path) -> str:
    """Of the tokenizer's files; empty when there are none."""
    return _digest_of(folder / name for name in _TOKENIZER)


def adapter_digest(folder: Path) -> str:
    """Of an adapter: its weights and its settings."""
    return digest(json.dumps([weights_digest(folder), _digest_of([folder / "adapter_config.json"])]).encode())


def _digest_of(files: Iterable[Path]) -> str:
    held = [[path.name, digest(path.read_bytes())] for path in files if path.is_file()]
    return digest(json.dumps(held).encode()) if held else ""


def _remembered(path: Path) -> str:
    """The fingerprint of a file's bytes, taken once on this machine for as long as the file stays as it is."""
    real = path.resolve()
    state = real.stat()
    about = [str(real), state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns]
    note = cache_folder() / "weights" / f"{digest(json.dumps(about).encode())}.txt"
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{note}.lock"):  # several workers of one machine start at once
            if note.is_file() and len(text := note.read_text().strip()) == 64:
                return text
            found = _fingerprint(real)
            note.write_text(found)
            return found
    except OSError:  # a cache folder that cannot be written costs time, not the answer
        return _fingerprint(real)


def _fingerprint(path: Path) -> str:
    size = path.stat().st_size
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)
    return fingerprint([("file", data)])
