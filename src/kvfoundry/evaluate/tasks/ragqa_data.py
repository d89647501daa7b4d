"""Questions with the passages to answer them from: our own set, or a user's file in one of three known forms."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvfoundry.evaluate.tasks.records import read_records

# Fictitious towns, people and machines: no model can know the answers, it has to read them.
OWN_DATA = Path(str(files("kvfoundry.evaluate").joinpath("data/ragqa.json")))


@dataclass(frozen=True)
class Passage:
    """One passage; gold: whether it is needed for the answer, None where the file does not say."""

    title: str
    text: str
    gold: bool | None = None


@dataclass(frozen=True)
class RagSample:
    """A question, its accepted answers, and the passages in the order in which they are read."""

    item: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]

    @property
    def hops(self) -> int | None:
        """How many passages the answer needs, as far as the file says."""
        gold = sum(bool(passage.gold) for passage in self.passages)
        return gold or None


@dataclass(frozen=True)
class RagData:
    """The samples of a file; digest: SHA-256 of what they say; damaged: why others of the file were left out."""

    path: Path
    samples: tuple[RagSample, ...]
    digest: str
    damaged: tuple[str, ...] = ()


def load_ragqa(path: Path = OWN_DATA, skip_damaged: bool = False) -> RagData:
    """The samples of a .json file (a list) or a .jsonl file, also with .gz behind.

    A sample has a `question`, `answers` (or `answer` and perhaps `answer_aliases`), and its passages as
    `ctxs` ({"title", "text"}, perhaps "gold"), as MuSiQue's `paragraphs` or as HotpotQA's `context`.

    Raises:
        DataError: the file cannot be used, or holds damaged samples that are not to be skipped.
    """
    records = read_records(path, _fault, skip_damaged)
    names = [_name(record) for record in records.rows]
    samples = []
    for number, (name, record) in enumerate(zip(names, records.rows, strict=True), start=1):
        item = name if name is not None and names.count(name) == 1 else str(number)
        answers = tuple(dict.fromkeys(_answers(record)))
        samples.append(RagSample(item, record["question"].strip(), answers, tuple(_passages(record))))
    digest = hashlib.sha256(json.dumps(records.rows, sort_keys=True).encode()).hexdigest()
    return RagData(path, tuple(samples), digest, records.damaged)


def _name(record: dict[str, Any]) -> str | None:
    named = record.get("id", record.get("_id"))
    return str(named) if isinstance(named, str | int) and str(named) else None


def _fault(record: dict[str, Any]) -> str | None:
    """What is wrong with a sample, with its id where it has one."""
    problem = _problem(record)
    name = _name(record)
    return f"({name}) {problem}" if problem and name is not None else problem


def _problem(record: dict[str, Any]) -> str | None:
    if not _is_text(record.get("question")):
        return "has no question"
    try:
        answers, passages = list(_answers(record)), list(_passages(record))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return f"is built in no known form ({type(error).__name__}: {error})"
    if not answers or not all(map(_is_text, answers)):
        return "has no answer in text"
    if not passages:
        return "has no passages under 'ctxs', 'paragraphs' or 'context'"
    for number, passage in enumerate(passages, start=1):
        if not isinstance(passage.title, str) or not _is_text(passage.text):
            return f"has no text in passage {number}"
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _answers(record: dict[str, Any]) -> Iterator[Any]:
    """Every accepted answer; of an entry that is itself a list, the first, as CacheBlend reads it."""
    if "answers" in record:
        for answer in _list(record["answers"]):
            yield answer[0] if isinstance(answer, list) else answer
    else:
        yield record["answer"]
        yield from _list(record.get("answer_aliases") or [])


def _passages(record: dict[str, Any]) -> Iterator[Passage]:
    for key, read in _FORMS.items():
        if key in record:
            yield from read(record)
            return


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} where a list belongs")
    return value


def _from_ctxs(record: dict[str, Any]) -> Iterator[Passage]:
    for entry in _list(record["ctxs"]):
        yield Passage(entry.get("title") or "", entry["text"], entry.get("gold"))


def _from_paragraphs(record: dict[str, Any]) -> Iterator[Passage]:
    for entry in _list(record["paragraphs"]):
        yield Passage(entry.get("title") or "", entry["paragraph_text"], entry.get("is_supporting"))


def _from_context(record: dict[str, Any]) -> Iterator[Passage]:
    supporting = {title for title, _ in _list(record.get("supporting_facts") or [])}
    for title, sentences in _list(record["context"]):
        yield Passage(title, "".join(sentences), title in supporting if supporting else None)


_FORMS: dict[str, Callable[[dict[str, Any]], Iterator[Passage]]] = {
    "ctxs": _from_ctxs,
    "paragraphs": _from_paragraphs,
    "context": _from_context,
}
