"""One segment of an index: passages that were added together, written once and never changed.

segment-000004.json          [{"id", "title", "text", "cut"}, ...]
segment-000004.safetensors   pooled, pooled_scales, tokens, tokens_scales, lengths: those that the index keeps
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvfoundry.errors import DataError
from kvfoundry.evaluate.tasks.ragqa_data import Passage
from kvfoundry.rag.encoders.base import Vectors
from kvfoundry.rag.manifest import SegmentNote, Settings
from kvfoundry.rag.vectors.int8 import Rows
from kvfoundry.rag.vectors.token_pooling import pool_tokens


@dataclass(frozen=True, eq=False)
class Segment:
    """Passages in their order with their vectors. cut: [passages], text longer than the encoder reads."""

    ids: tuple[str, ...]
    passages: tuple[Passage, ...]
    cut: tuple[bool, ...]
    pooled: Rows | None = None
    tokens: Rows | None = None
    lengths: Tensor | None = None

    @classmethod
    def of(
        cls, ids: Sequence[str], passages: Sequence[Passage], vectors: Sequence[Vectors] | None, settings: Settings
    ) -> Segment:
        """Round and pool what an encoder made, as the settings say; vectors: None where the index keeps none."""
        plain = tuple(Passage(passage.title, passage.text) for passage in passages)
        if vectors is None:
            return cls(tuple(ids), plain, (False,) * len(plain))
        pooled = tokens = lengths = None
        if "pooled" in settings.keeps:
            pooled = Rows.of(
                torch.stack([each.pooled for each in vectors if each.pooled is not None]), settings.rounded
            )
        if "tokens" in settings.keeps:
            rows = [pool_tokens(each.tokens, settings.pool) for each in vectors if each.tokens is not None]
            tokens = Rows.of(torch.cat(rows), settings.rounded)
            lengths = torch.tensor([len(each) for each in rows], dtype=torch.int32)
        return cls(tuple(ids), plain, tuple(each.cut for each in vectors), pooled, tokens, lengths)

    def __len__(self) -> int:
        return len(self.ids)

    def kept(self, rows: Sequence[int]) -> Segment:
        """Some of the passages, in the order asked for."""
        index = torch.tensor(rows, dtype=torch.long)
        tokens = lengths = None
        if self.tokens is not None and self.lengths is not None:
            counts = self.lengths.long()
            starts = counts.cumsum(0) - counts
            spans = [torch.arange(int(starts[row]), int(starts[row] + counts[row])) for row in rows]
            tokens = self.tokens.take(torch.cat(spans) if spans else torch.zeros(0, dtype=torch.long))
            lengths = self.lengths[index]
        return Segment(
            tuple(self.ids[row] for row in rows),
            tuple(self.passages[row] for row in rows),
            tuple(self.cut[row] for row in rows),
            None if self.pooled is None else self.pooled.take(index),
            tokens,
            lengths,
        )

    @staticmethod
    def joined(parts: Sequence[Segment]) -> Segment:
        """The passages of several, one after the other."""
        pooled = [part.pooled for part in parts if part.pooled is not None]
        tokens = [part.tokens for part in parts if part.tokens is not None]
        lengths = [part.lengths for part in parts if part.lengths is not None]
        return Segment(
            tuple(name for part in parts for name in part.ids),
            tuple(passage for part in parts for passage in part.passages),
            tuple(cut for part in parts for cut in part.cut),
            Rows.joined(pooled) if pooled else None,
            Rows.joined(tokens) if tokens else None,
            torch.cat(lengths) if lengths else None,
        )

    def save(self, folder: Path, name: str) -> SegmentNote:
        """Write both files and make sure that they are on the disk; nobody reads them before a manifest names them."""
        told = [
            {"id": one, "title": passage.title, "text": passage.text, "cut": cut}
            for one, passage, cut in zip(self.ids, self.passages, self.cut, strict=True)
        ]
        files = {f"{name}.json": json.dumps(told).encode()}
        if tensors := self._tensors():
            files[f"{name}.safetensors"] = save(tensors)
        for file, data in files.items():
            with (folder / file).open("wb") as sink:
                sink.write(data)
                sink.flush()
                os.fsync(sink.fileno())
        return SegmentNote(name, len(self), {file: zlib.crc32(data) for file, data in files.items()})

    def _tensors(self) -> dict[str, Tensor]:
        found = {"lengths": self.lengths}
        for name, rows in (("pooled", self.pooled), ("tokens", self.tokens)):
            if rows is not None:
                found |= {name: rows.codes, f"{name}_scales": rows.scales}
        return {name: tensor.contiguous() for name, tensor in found.items() if tensor is not None}

    @classmethod
    def load(cls, folder: Path, note: SegmentNote) -> Segment:
        """Read a segment and check it against its note.

        Raises:
            DataError: a file is absent or is not what was written.
        """
        try:
            raw = {name: (folder / name).read_bytes() for name in note.files}
        except OSError as error:
            raise _damaged(folder, f"{note.name}: {error.strerror}") from error
        for name, data in raw.items():
            if zlib.crc32(data) != note.files[name]:
                raise _damaged(folder, f"{name} has changed since it was written")
        try:
            told = json.loads(raw[f"{note.name}.json"])
            held = load(raw[f"{note.name}.safetensors"]) if f"{note.name}.safetensors" in raw else {}
            rows = {
                name: Rows(held[name], held.get(f"{name}_scales")) if name in held else None
                for name in ("pooled", "tokens")
            }
            return cls(
                tuple(each["id"] for each in told),
                tuple(Passage(each["title"], each["text"]) for each in told),
                tuple(each["cut"] for each in told),
                rows["pooled"],
                rows["tokens"],
                held.get("lengths"),
            )
        except (KeyError, TypeError, ValueError, SafetensorError) as error:
            raise _damaged(folder, f"{note.name}: {type(error).__name__}") from error


def _damaged(folder: Path, how: str) -> DataError:
    return DataError(f"the index {folder} is damaged ({how}); delete the folder and index again.")
