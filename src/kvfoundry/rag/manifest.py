"""What an index folder holds, as one small file that is replaced in one step: settings, segments, dead rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvfoundry.errors import DataError
from kvfoundry.evaluate.results import write_text

MANIFEST = "index.json"
_FORMAT = "kvfoundry passage index"
_VERSION = 1


@dataclass(frozen=True)
class Settings:
    """What decides the vectors of an index.

    Attributes:
        encoder: name of the encoder, "" where no vectors are kept.
        digest: its digest.
        keeps: "pooled", "tokens", both or none.
        rounded: vectors are kept in int8; float32 otherwise.
        pool: about one of so many token vectors is kept.
    """

    encoder: str = ""
    digest: str = ""
    keeps: frozenset[str] = frozenset()
    rounded: bool = True
    pool: int = 1

    def difference(self, asked: Settings) -> str | None:
        """What of these settings does not serve a use that asks for others; None when all does."""
        if missing := asked.keeps - self.keeps:
            return f"keeps no {' and no '.join(sorted(missing))} vectors"
        if not asked.keeps:
            return None
        if self.digest != asked.digest:
            return f"was made with the encoder {self.encoder!r} ({self.digest}), not {asked.encoder!r} ({asked.digest})"
        if self.rounded != asked.rounded:
            return f"keeps {'int8' if self.rounded else 'float32'} vectors"
        if "tokens" in asked.keeps and self.pool != asked.pool:
            return f"pools {self.pool} token vectors into one, not {asked.pool}"
        return None


@dataclass(frozen=True)
class SegmentNote:
    """A segment as the manifest knows it. files: name -> CRC-32; dead: rows that were replaced or deleted."""

    name: str
    rows: int
    files: Mapping[str, int]
    dead: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Manifest:
    """generation: grows by one with every change, so that a writer sees what another one did."""

    settings: Settings
    segments: tuple[SegmentNote, ...] = ()
    generation: int = 0
    serial: int = field(default=0)
    """Number of the next segment; never used twice."""

    def changed(self, **what: Any) -> Manifest:
        """The next generation."""
        return replace(self, generation=self.generation + 1, **what)

    def save(self, folder: Path) -> None:
        """Replace the manifest of a folder."""
        settings = vars(self.settings) | {"keeps": sorted(self.settings.keeps)}
        segments = [
            {"name": each.name, "rows": each.rows, "files": dict(each.files), "dead": sorted(each.dead)}
            for each in self.segments
        ]
        record = {
            "format": _FORMAT, "version": _VERSION, "generation": self.generation, "serial": self.serial,
            "settings": settings, "segments": segments,
        }  # fmt: skip
        write_text(folder / MANIFEST, json.dumps(record, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """The manifest of a folder, None where there is none.

        Raises:
            DataError: it is something else, of another version, or damaged.
        """
        path = folder / MANIFEST
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise DataError(
                f"the index {folder} cannot be read ({error}); delete the folder and index again."
            ) from error
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            raise DataError(f"{path} is no passage index of ours; name another folder.")
        if record.get("version") != _VERSION:
            raise DataError(
                f"the index {folder} has version {record.get('version')!r:.20}; this is version {_VERSION}."
            )
        try:
            settings = Settings(**(record["settings"] | {"keeps": frozenset(record["settings"]["keeps"])}))
            segments = tuple(
                SegmentNote(str(each["name"]), int(each["rows"]), dict(each["files"]), frozenset(each["dead"]))
                for each in record["segments"]
            )
            return cls(settings, segments, int(record["generation"]), int(record["serial"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the index {folder} is damaged ({type(error).__name__}: {error}); delete the folder and index again."
            ) from error
