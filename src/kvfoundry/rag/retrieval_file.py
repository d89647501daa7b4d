"""What retrieval found for a file of questions, as `results/retrieval/<dataset>_rag_<mode>_k<k>.json`.

The file names passages by id and by the SHA-256 of their text; a reader gives it the dataset and gets passages back,
or hears that it belongs to another one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvfoundry.errors import DataError
from kvfoundry.evaluate.results import write_text
from kvfoundry.evaluate.tasks.ragqa_data import Passage
from kvfoundry.rag.dataset import Dataset, text_hash
from kvfoundry.rag.recall import Recall, recall_of

MODES = ("both", "own", "corpus")
_FORMAT = "kvfoundry retrieval"
_VERSION = 1


@dataclass(frozen=True)
class Found:
    """One passage of a sample's list. score: in the retriever's units, comparable within the list only."""

    id: str
    score: float
    text_sha256: str


@dataclass(frozen=True)
class Answered:
    """What was found for one sample, the best first.

    Attributes:
        own: among the sample's own passages; None where the mode leaves it out.
        corpus: among all passages of the index; None likewise.
        gold: ids of the passages that the answer needs, as far as the file says.
    """

    item: str
    question: str
    answers: tuple[str, ...]
    own: tuple[Found, ...] | None
    corpus: tuple[Found, ...] | None
    gold: tuple[str, ...]


@dataclass(frozen=True)
class Retrieval:
    """A whole retrieval file.

    Attributes:
        dataset: name, path, digest, how many samples there are.
        about: what was searched, and how: retriever, encoder, index, passages, sizes, times.
        extra: passages that were found and stand in no sample (an index may hold more): id -> {"title", "text"}.
    """

    dataset: Mapping[str, Any]
    mode: str
    k: int
    about: Mapping[str, Any]
    samples: tuple[Answered, ...]
    skipped: tuple[str, ...]
    extra: Mapping[str, Mapping[str, str]]

    def recall(self, which: str) -> Recall | None:
        """Recall at k of "own" or "corpus" over the labelled samples; None without any, or without that search."""
        lists = [(getattr(each, which), frozenset(each.gold)) for each in self.samples]
        return recall_of(([one.id for one in found], gold) for found, gold in lists if found is not None)

    def passages(self, dataset: Dataset) -> dict[str, Passage]:
        """Every passage that was found, by id.

        Raises:
            DataError: the file belongs to another dataset, or a text is not the one that was found.
        """
        if dataset.digest != self.dataset["sha256"]:
            raise DataError(
                f"the retrieval file was made for {self.dataset['path']} ({self.dataset['sha256'][:12]}), not for "
                f"{dataset.path} ({dataset.digest[:12]}) as it is now; retrieve again."
            )
        known = dataset.passages | {name: Passage(each["title"], each["text"]) for name, each in self.extra.items()}
        found: dict[str, Passage] = {}
        for answered in self.samples:
            for one in (*(answered.own or ()), *(answered.corpus or ())):
                if one.id not in known or text_hash(known[one.id]) != one.text_sha256:
                    raise DataError(f"passage {one.id} of sample {answered.item} is not the text that was found.")
                found[one.id] = known[one.id]
        return found

    def save(self, path: Path) -> None:
        """Write the file in one step.

        Raises:
            DataError: it cannot be written.
        """
        record = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        record["recall"] = {
            which: asdict(found) if (found := self.recall(which)) else None for which in ("own", "corpus")
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(record, indent=1) + "\n")
        except OSError as error:
            raise DataError(f"{path} cannot be written ({error.strerror}).") from error

    @classmethod
    def load(cls, path: Path) -> Retrieval:
        """Read a file of `save`.

        Raises:
            DataError: it cannot be read, or is something else.
        """
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"retrieval file {path} cannot be read ({error.strerror}).") from error
        except ValueError as error:
            raise DataError(f"retrieval file {path} is not JSON ({error}).") from error
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            raise DataError(f"{path} is no retrieval file; make one with kvfoundry rag retrieve.")
        if record.get("version") != _VERSION:
            raise DataError(f"retrieval file {path} has version {record.get('version')!r:.20}; this is {_VERSION}.")
        try:
            return cls(
                dict(record["dataset"]),
                record["mode"],
                int(record["k"]),
                dict(record["about"]),
                tuple(_answered(each) for each in record["samples"]),
                tuple(record["skipped"]),
                dict(record["extra"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"retrieval file {path} is damaged ({type(error).__name__}: {error}).") from error


def retrieval_path(folder: Path, dataset: str, mode: str, k: int) -> Path:
    """`<folder>/<dataset>_rag_<mode>_k<k>.json`."""
    return folder / f"{dataset}_rag_{mode}_k{k}.json"


def _answered(record: dict[str, Any]) -> Answered:
    lists = {
        which: None if record[which] is None else tuple(Found(**each) for each in record[which])
        for which in ("own", "corpus")
    }
    return Answered(
        record["item"],
        record["question"],
        tuple(record["answers"]),
        lists["own"],
        lists["corpus"],
        tuple(record["gold"]),
    )
