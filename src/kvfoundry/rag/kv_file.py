"""What building left behind, as `results/kv_caches/<dataset>_kv_top<k>.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from kvfoundry.chunks import Identity
from kvfoundry.chunks.identity import digest, encoded
from kvfoundry.errors import DataError
from kvfoundry.evaluate.results import write_text

Tier = Literal["device", "host", "text"]
_FORMAT, _VERSION = "kvfoundry kv caches", 1


@dataclass(frozen=True)
class BuiltChunk:
    """One candidate of a sample, in the order of places.

    Attributes:
        id: of the passage.
        key: of its chunk in the store.
        tier: "device" for those that are resident when the answer begins, "host" for placeholders whose KV is kept in
            memory or on disk, "text" for those of which only text and key summary are.
        bytes: of its rows on the device.
        seconds: that this build spent on it, 0 where it was stored already.
    """

    id: str
    key: str
    tokens: int
    tier: Tier
    bytes: int
    seconds: float


@dataclass(frozen=True)
class BuiltSample:
    """The candidates of a sample."""

    item: str
    chunks: tuple[BuiltChunk, ...]


@dataclass(frozen=True)
class KvFile:
    """A whole file. settings: everything that decoding must do alike; model: digest of the chunks' identity."""

    dataset: Mapping[str, Any]
    retrieval: str
    model: str
    settings: Mapping[str, Any]
    samples: tuple[BuiltSample, ...]
    skipped: tuple[str, ...]
    seconds: float

    def require_model(self, identity: Identity, path: Path) -> None:
        """DataError unless the chunks are of this model, tokenizer and method."""
        if identity_digest(identity) != self.model:
            raise DataError(f"the chunks of {path} were made with another model, tokenizer or dtype; build again.")

    def save(self, path: Path) -> None:
        """Write the file in one step. DataError where it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            record = {"format": _FORMAT, "version": _VERSION, **asdict(self), "totals": self.totals()}
            write_text(path, json.dumps(record, indent=1) + "\n")
        except OSError as error:
            raise DataError(f"{path} cannot be written ({error.strerror}).") from error

    def totals(self) -> dict[str, Any]:
        """Chunks, tokens and bytes by tier, each chunk of each sample counted."""
        found: dict[str, Any] = {}
        for sample in self.samples:
            for chunk in sample.chunks:
                own = found.setdefault(chunk.tier, {"chunks": 0, "tokens": 0, "bytes": 0})
                own["chunks"] += 1
                own["tokens"] += chunk.tokens
                own["bytes"] += chunk.bytes
        return found

    @classmethod
    def load(cls, path: Path) -> KvFile:
        """Read a file of `save`. DataError where it cannot be read, or is something else."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); make it with kvfoundry rag build.") from error
        except ValueError as error:
            raise DataError(f"{path} is not JSON ({error}).") from error
        if not isinstance(record, dict) or record.get("format") != _FORMAT or record.get("version") != _VERSION:
            raise DataError(f"{path} was not made by this version's kvfoundry rag build; build again.")
        try:
            samples = tuple(
                BuiltSample(each["item"], tuple(BuiltChunk(**chunk) for chunk in each["chunks"]))
                for each in record["samples"]
            )
            return cls(
                dict(record["dataset"]), record["retrieval"], record["model"], dict(record["settings"]), samples,
                tuple(record["skipped"]), float(record["seconds"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is damaged ({type(error).__name__}: {error}); build again.") from error


def kv_path(folder: Path, dataset: str, top: int) -> Path:
    """`<folder>/<dataset>_kv_top<k>.json`."""
    return folder / f"{dataset}_kv_top{top}.json"


def identity_digest(identity: Identity) -> str:
    """One word for all parts of an identity."""
    return digest(encoded(identity.parts))
