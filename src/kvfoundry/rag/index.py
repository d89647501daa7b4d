"""A passage index on disk: add, replace and delete passages, save and reopen, search.

A passage is known by its id, which is the caller's or follows from the text (`dataset.passage_id`); it never changes
and means nothing about where the passage stands. Segments are written once; one manifest says which of them count and
which of their rows are dead, and is replaced in one step: after a kill the index is what it was before the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

from kvfoundry.errors import DataError, SpecError
from kvfoundry.evaluate.tasks.ragqa_data import Passage
from kvfoundry.rag.collection import Collection
from kvfoundry.rag.encoders.base import Encoder
from kvfoundry.rag.manifest import MANIFEST, Manifest, SegmentNote, Settings
from kvfoundry.rag.retrievers import DEFAULT, Hit, Question, Retriever
from kvfoundry.rag.segments import Segment

# Passages that are encoded and saved together: what a kill can cost.
_BATCH = 256
# More segments than this, or more dead rows than living ones, are rewritten into one.
_SEGMENTS = 16


class PassageIndex:
    """The passages of one folder under one encoder.

    Args:
        folder: made where it does not exist; an index of before is opened.
        encoder: makes the vectors; None for retrievers that need none.
        keeps: which vectors are kept ("pooled", "tokens"), as `Retriever.needs` says.
        rounded: keep vectors in int8; False keeps float32, four times as large.
        pool: keep about one of so many token vectors (needs the extra `rag` above 1).

    Raises:
        DataError: the folder holds something else, is damaged, or was made with other settings.
    """

    def __init__(
        self,
        folder: str | Path,
        encoder: Encoder | None = None,
        *,
        keeps: frozenset[str] | None = None,
        rounded: bool = True,
        pool: int = 1,
    ):
        self.folder, self.encoder = Path(folder), encoder
        if isinstance(pool, bool) or not isinstance(pool, int) or pool < 1:
            raise SpecError(f"pool must be a whole number of at least 1, got {pool!r}.")
        makes = frozenset() if encoder is None else encoder.makes
        wanted = makes if keeps is None else keeps
        if absent := wanted - makes:
            name = "no encoder" if encoder is None else f"the encoder {encoder.name!r}"
            raise SpecError(f"{name} makes no {' and no '.join(sorted(absent))} vectors; name another encoder.")
        asked = Settings(
            encoder.name if encoder and wanted else "",
            encoder.digest if encoder and wanted else "",
            wanted,
            rounded,
            pool,
        )
        self._manifest = self._opened(asked)
        self._load()

    def _opened(self, asked: Settings) -> Manifest:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            found = Manifest.load(self.folder)
            if found is None:
                found = Manifest(asked)
                found.save(self.folder)
        except OSError as error:
            raise DataError(f"the index {self.folder} cannot be written ({error.strerror}).") from error
        if problem := found.settings.difference(asked):
            raise DataError(f"the index {self.folder} {problem}; name another folder, or delete it and index again.")
        return found

    def _load(self) -> None:
        while True:
            try:
                self._hold(self._manifest, [Segment.load(self.folder, note) for note in self._manifest.segments])
                return
            except DataError:
                present = Manifest.load(self.folder)
                if present is None or present.generation == self._manifest.generation:
                    raise
                self._manifest = present  # a writer has rewritten segments since the manifest was read

    def _hold(self, manifest: Manifest, segments: list[Segment]) -> None:
        self._manifest, self._segments = manifest, segments
        self._found: Collection | None = None
        self._where = {
            name: (number, row)
            for number, (note, segment) in enumerate(zip(manifest.segments, segments, strict=True))
            for row, name in enumerate(segment.ids)
            if row not in note.dead
        }

    # --- looking ---

    @property
    def settings(self) -> Settings:
        """What decides the vectors."""
        return self._manifest.settings

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __getitem__(self, name: str) -> Passage:
        """The passage of an id.

        Raises:
            DataError: there is none.
        """
        if name not in self._where:
            raise DataError(f"the index {self.folder} holds no passage {name!r}.")
        number, row = self._where[name]
        return self._segments[number].passages[row]

    @property
    def ids(self) -> tuple[str, ...]:
        """Every id, in the order of writing."""
        return tuple(self._where)

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors that count."""
        stored = (self.collection.pooled, self.collection.tokens)
        return sum(rows.nbytes for rows in stored if rows is not None)

    @property
    def cut(self) -> tuple[str, ...]:
        """Ids of passages whose end the encoder did not read."""
        return tuple(name for name, (number, row) in self._where.items() if self._segments[number].cut[row])

    @property
    def collection(self) -> Collection:
        """The living passages in memory; a new object after every change."""
        if self._found is None:
            living = [
                segment.kept([row for row in range(len(segment)) if row not in note.dead]) if note.dead else segment
                for note, segment in zip(self._manifest.segments, self._segments, strict=True)
            ]
            whole = Segment.joined(living)
            self._found = Collection(whole.ids, whole.passages, whole.pooled, whole.tokens, whole.lengths)
        return self._found

    def search(
        self, question: str, k: int, retriever: str | Retriever = DEFAULT, among: Iterable[str] | None = None
    ) -> list[Hit]:
        """The `k` best passages for a question, the best first.

        among: ids of the only candidates; every passage otherwise.

        Raises:
            SpecError: a retriever that this index cannot serve, or a `k` below 1.
            DataError: more passages are asked for than there are, or an id that is not there.
        """
        recipe = Retriever.parse(retriever)
        if absent := recipe.needs - self.settings.keeps:
            raise SpecError(
                f"the retriever {recipe} needs {' and '.join(sorted(absent))} vectors, which the index {self.folder} "
                "does not keep; make an index with them."
            )
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise SpecError(f"k must be a whole number of at least 1, got {k!r}.")
        rows = self.collection.rows(among)
        if k > len(rows):
            raise DataError(f"k={k} passages are asked for, and there are {len(rows)} candidates.")
        return recipe.search(Question(question, self.encoder, recipe.needs), self.collection, k, rows)

    # --- changing ---

    def add(self, passages: Mapping[str, Passage], on_progress: Callable[[int, int], None] | None = None) -> int:
        """Take in passages under their ids; those that are there with the same words are skipped.

        on_progress: told (done, all) after each batch. A kill costs the batch that is being encoded.

        Returns:
            How many are new.

        Raises:
            DataError: an id that is there with other words, an empty text, or another process is writing.
        """
        with self._writing():
            new = {name: each for name, each in passages.items() if not self._is_there(name, each)}
            for name in new:
                if name in self._where:
                    raise DataError(f"the index {self.folder} holds other words under {name!r}; use replace for it.")
            self._write(new, on_progress)
        return len(new)

    def replace(self, passages: Mapping[str, Passage], on_progress: Callable[[int, int], None] | None = None) -> int:
        """Give ids that are there new words; nothing of the old ones is found any more.

        Returns:
            How many have changed.

        Raises:
            DataError: an id that is not there, an empty text, or another process is writing.
        """
        with self._writing():
            self._must_hold(passages)
            changed = {name: each for name, each in passages.items() if not self._is_there(name, each)}
            self._write(changed, on_progress)
        return len(changed)

    def delete(self, ids: Iterable[str]) -> int:
        """Remove passages; ids of the others stay what they are.

        Raises:
            DataError: an id that is not there, or another process is writing.
        """
        with self._writing():
            gone = list(dict.fromkeys(ids))
            self._must_hold(gone)
            if gone:
                self._commit(self._buried(gone))
                self._compact()
        return len(gone)

    def _is_there(self, name: str, passage: Passage) -> bool:
        return name in self._where and (self[name].title, self[name].text) == (passage.title, passage.text)

    def _must_hold(self, ids: Iterable[str]) -> None:
        absent = [name for name in ids if name not in self._where]
        if absent:
            raise DataError(f"the index {self.folder} holds no passage {absent[0]!r} ({len(absent)} are absent).")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One writer at a time, who begins with what the one before left."""
        from filelock import FileLock, Timeout

        try:
            with FileLock(self.folder / ".lock", timeout=1):
                present = Manifest.load(self.folder)
                if present is not None and present.generation != self._manifest.generation:
                    self._manifest = present
                    self._load()
                yield
        except Timeout as error:
            raise DataError(f"the index {self.folder} is being written by another process; wait for it.") from error
        except OSError as error:
            raise DataError(f"the index {self.folder} cannot be written ({error.strerror or error}).") from error

    def _write(self, passages: Mapping[str, Passage], on_progress: Callable[[int, int], None] | None) -> None:
        for name, passage in passages.items():
            if not isinstance(name, str) or not name:
                raise DataError(f"an id must be text, got {name!r}.")
            if not passage.text.strip():
                raise DataError(f"passage {name!r} has no text.")
        waiting, done = iter(passages.items()), 0
        while batch := list(islice(waiting, _BATCH)):
            ids, texts = [name for name, _ in batch], [passage for _, passage in batch]
            vectors = None
            if self.settings.keeps and self.encoder is not None:
                vectors = list(self.encoder.passages(texts, self.settings.keeps))
            self._append(Segment.of(ids, texts, vectors, self.settings))
            done += len(batch)
            if on_progress is not None:
                on_progress(done, len(passages))
        self._compact()

    def _append(self, segment: Segment) -> None:
        name = f"segment-{self._manifest.serial:06d}"
        note = segment.save(self.folder, name)
        manifest = self._buried([each for each in segment.ids if each in self._where])
        self._commit(
            replace(manifest, segments=(*manifest.segments, note), serial=manifest.serial + 1),
            [*self._segments, segment],
        )

    def _buried(self, ids: Sequence[str]) -> Manifest:
        """The next manifest, with the rows of these ids dead."""
        dead: dict[int, set[int]] = {}
        for name in ids:
            number, row = self._where[name]
            dead.setdefault(number, set()).add(row)
        notes = [
            replace(note, dead=note.dead | dead[number]) if number in dead else note
            for number, note in enumerate(self._manifest.segments)
        ]
        return self._manifest.changed(segments=tuple(notes))

    def _commit(self, manifest: Manifest, segments: list[Segment] | None = None) -> None:
        manifest.save(self.folder)
        self._hold(manifest, self._segments if segments is None else segments)

    def _compact(self) -> None:
        """Rewrite many small segments, or mostly dead ones, into one; remove files that no manifest names."""
        notes = self._manifest.segments
        dead = sum(len(note.dead) for note in notes)
        if len(notes) > _SEGMENTS or dead > len(self):
            living = [
                segment.kept([row for row in range(len(segment)) if row not in note.dead])
                for note, segment in zip(notes, self._segments, strict=True)
            ]
            merged: list[Segment] = [Segment.joined(living)] if len(self) else []
            written: list[SegmentNote] = [
                each.save(self.folder, f"segment-{self._manifest.serial:06d}") for each in merged
            ]
            manifest = self._manifest.changed(segments=tuple(written), serial=self._manifest.serial + len(written))
            self._commit(manifest, merged)
        named = {file for note in self._manifest.segments for file in note.files} | {MANIFEST, ".lock"}
        for path in self.folder.glob("segment-*"):
            if path.name not in named:
                path.unlink(missing_ok=True)
