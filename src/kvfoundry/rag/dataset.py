"""A file of questions as retrieval sees it: passages with ids of their own, duplicates met, bad samples named.

The file is read by the same reader as `kvfoundry eval ragqa`: `ctxs`, `question`, `answers` and two more known forms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvfoundry.errors import DataError
from kvfoundry.evaluate.tasks.ragqa_data import Passage, RagSample, load_ragqa

ID_LENGTH = 16


def passage_id(passage: Passage) -> str:
    """The id of a passage that was given none: 16 hex characters that its title and text decide.

    So a passage that several samples share is indexed once, and an id means the same text in every file.
    """
    return hashlib.sha256(f"{passage.title}\0{passage.text}".encode()).hexdigest()[:ID_LENGTH]


def text_hash(passage: Passage) -> str:
    """SHA-256 of the text alone, in hex."""
    return hashlib.sha256(passage.text.encode()).hexdigest()


@dataclass(frozen=True)
class Candidate:
    """A passage of a sample; place: where it stands in the sample's list, from 0."""

    id: str
    place: int
    passage: Passage


@dataclass(frozen=True)
class Asked:
    """A sample with its passages as candidates, each once."""

    sample: RagSample
    candidates: tuple[Candidate, ...]

    @property
    def item(self) -> str:
        """The id of the sample, or its number where it has none."""
        return self.sample.item

    @cached_property
    def gold(self) -> frozenset[str]:
        """Ids of the passages that the answer needs; empty where the file does not say."""
        return frozenset(each.id for each in self.candidates if each.passage.gold)


@dataclass(frozen=True)
class Dataset:
    """The usable samples of a file.

    Attributes:
        name: the name of the file without its endings.
        digest: SHA-256 of what the samples say.
        skipped: a sentence for each sample that is left out, with its id.
        duplicates: a sentence for each sample that holds a passage twice; the second is not a candidate.
    """

    path: Path
    name: str
    digest: str
    samples: tuple[Asked, ...]
    skipped: tuple[str, ...]
    duplicates: tuple[str, ...]

    @cached_property
    def passages(self) -> dict[str, Passage]:
        """Every distinct passage by its id, in the order of the file."""
        return {each.id: each.passage for asked in self.samples for each in asked.candidates}

    @cached_property
    def places(self) -> dict[str, tuple[str, int]]:
        """id -> (sample, place) where the passage first stands."""
        found: dict[str, tuple[str, int]] = {}
        for asked in self.samples:
            for each in asked.candidates:
                found.setdefault(each.id, (asked.item, each.place))
        return found


def load_dataset(path: Path) -> Dataset:
    """The samples of a .json file (a list) or a .jsonl file, also with .gz behind; damaged ones are named and skipped.

    Raises:
        DataError: the file cannot be used, or no sample of it can.
    """
    data = load_ragqa(path, skip_damaged=True)
    samples, duplicates = [], []
    for sample in data.samples:
        candidates, twice = _candidates(sample)
        samples.append(Asked(sample, candidates))
        if twice:
            pairs = ", ".join(f"{later} is {first} again" for first, later in twice)
            duplicates.append(f"sample {sample.item}: passage {pairs}")
    return Dataset(path, dataset_name(path), data.digest, tuple(samples), data.damaged, tuple(duplicates))


def dataset_name(path: Path) -> str:
    """ "data/musique_s.json.gz" -> "musique_s"."""
    name = path.name.removesuffix(".gz")
    return name.removesuffix(".jsonl").removesuffix(".json") or name


def _candidates(sample: RagSample) -> tuple[tuple[Candidate, ...], list[tuple[int, int]]]:
    """Each distinct passage once, and (first, later) numbers from 1 of those that come again.

    A label on any of several equal passages is a label of the one that stays.
    """
    found: dict[str, Candidate] = {}
    twice: list[tuple[int, int]] = []
    for place, passage in enumerate(sample.passages):
        name = passage_id(passage)
        if name not in found:
            found[name] = Candidate(name, place, passage)
            continue
        first = found[name]
        twice.append((first.place + 1, place + 1))
        if passage.gold:
            found[name] = Candidate(name, first.place, passage)
    return tuple(found.values()), twice


def limited(dataset: Dataset, limit: int | None) -> Dataset:
    """The first `limit` samples, as a dataset of the same digest; all of them for None.

    Raises:
        DataError: a limit below 1.
    """
    if limit is None:
        return dataset
    if limit < 1:
        raise DataError(f"--limit must be at least 1, got {limit}.")
    return Dataset(
        dataset.path, dataset.name, dataset.digest, dataset.samples[:limit], dataset.skipped, dataset.duplicates
    )


def told(dataset: Dataset) -> Iterator[str]:
    """What a user should know of a file before it is used: one line for each kind of trouble."""
    for sentences, what in ((dataset.skipped, "left out"), (dataset.duplicates, "with a passage twice")):
        if sentences:
            more = f"; and {len(sentences) - 3} more" if len(sentences) > 3 else ""
            noun = "sample" if len(sentences) == 1 else "samples"
            yield f"{len(sentences)} {noun} of {dataset.path} {what}: {'; '.join(sentences[:3])}{more}"
