"""Questions with documents to answer them from, read from a local SQuAD-style or HotpotQA-style JSON file."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvfoundry.errors import DataError
from kvfoundry.evaluate.tasks.records import read_json, sort_out, text_fault

Style = Literal["squad", "hotpot"]


@dataclass(frozen=True)
class Question:
    """A question, its accepted answers, and places in the file's documents.

    needed: the documents that hold the answer. near: the next best to distract with, those of the same article or of
    the same question.
    """

    question: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...]


@dataclass(frozen=True)
class QAData:
    """All questions and documents of one file; `skipped` says what was left out as damaged."""

    path: Path
    style: Style
    questions: tuple[Question, ...]
    documents: tuple[str, ...]
    skipped: tuple[str, ...]


class _Documents:
    """Texts without repetition, in the order in which they were first seen."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def add(self, text: str) -> int:
        return self._places.setdefault(text, len(self._places))

    def texts(self) -> tuple[str, ...]:
        return tuple(self._places)


def read_qa(path: Path, skip_damaged: bool = False) -> QAData:
    """The questions of a SQuAD-style file ({"data": [...]}) or a HotpotQA-style file (a list), also with .gz behind.

    Questions of SQuAD that have no answer are no questions here.

    Raises:
        DataError: neither style, or damaged records that are not to be skipped.
    """
    content = read_json(path)
    documents = _Documents()
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        found = ((f"article {number}", article) for number, article in enumerate(content["data"], start=1))
        rows, skipped = sort_out(path, found, _squad_fault, skip_damaged)
        questions = [question for article in rows for question in _squad_questions(article, documents)]
        style: Style = "squad"
    elif isinstance(content, list):
        found = ((f"record {number}", record) for number, record in enumerate(content, start=1))
        rows, skipped = sort_out(path, found, _hotpot_fault, skip_damaged)
        questions = [_hotpot_question(record, documents) for record in rows]
        style = "hotpot"
    else:
        raise DataError(f'data file {path} is neither SQuAD-style ({{"data": [...]}}) nor HotpotQA-style (a list).')
    if not questions:
        raise DataError(f"data file {path} holds no question with an answer.")
    return QAData(path, style, tuple(questions), documents.texts(), skipped)


def _squad_fault(article: dict[str, Any]) -> str | None:
    try:
        for paragraph in article["paragraphs"]:
            texts = [paragraph["context"]]
            for entry in paragraph["qas"]:
                texts += [entry["question"], *(answer["text"] for answer in entry["answers"])]
            if not all(isinstance(text, str) for text in texts):
                return "has something that is not text where a text belongs"
    except (KeyError, TypeError) as error:
        return f"is not built as an article of SQuAD ({type(error).__name__}: {error})"
    return None


def _squad_questions(article: dict[str, Any], documents: _Documents) -> Iterator[Question]:
    places = [documents.add(paragraph["context"].strip()) for paragraph in article["paragraphs"]]
    for place, paragraph in zip(places, article["paragraphs"], strict=True):
        near = _without(places, {place})
        for entry in paragraph["qas"]:
            answers = tuple(dict.fromkeys(answer["text"] for answer in entry["answers"] if answer["text"].strip()))
            if answers and not entry.get("is_impossible"):
                yield Question(entry["question"].strip(), answers, (place,), near)


def _hotpot_fault(record: dict[str, Any]) -> str | None:
    problem = text_fault("question", "answer")(record)
    if problem:
        return problem
    try:
        titles = set()
        for title, sentences in record["context"]:
            if not all(isinstance(text, str) for text in (title, *sentences)):
                return "has something that is not text in field 'context'"
            titles.add(title)
        supporting = {title for title, _ in record["supporting_facts"]}
    except (KeyError, TypeError, ValueError) as error:
        return f"is not built as a record of HotpotQA ({type(error).__name__}: {error})"
    if not supporting or not supporting <= titles:
        return "has supporting facts from no document of its own"
    return None


def _hotpot_question(record: dict[str, Any], documents: _Documents) -> Question:
    supporting = {title for title, _ in record["supporting_facts"]}
    texts = [(title, "".join(sentences).strip()) for title, sentences in record["context"]]
    places = [(title, documents.add(f"{title}\n{text}")) for title, text in texts]
    needed = dict.fromkeys(place for title, place in places if title in supporting)
    near = _without((place for _, place in places), set(needed))
    return Question(record["question"].strip(), (record["answer"],), tuple(needed), near)


def _without(places: Iterable[int], left_out: set[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(place for place in places if place not in left_out))
