"""BABILong: a few facts of a small world between the sentences of a book, and a question that needs some of them.

Source of the form: Kuratov et al., "BABILong: Testing the Limits of LLMs with Long Context Reasoning-in-a-Haystack",
2024, arXiv:2406.10149; the facts are those of bAbI (Weston et al., 2015, arXiv:1502.05698). The data are local files,
the prompts are worded here.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfoundry.errors import DataError, unknown_name
from kvfoundry.evaluate.tasks.base import Item, TaskError
from kvfoundry.evaluate.tasks.records import Records, read_records, text_fault

_PLACES = frozenset({"bathroom", "bedroom", "garden", "hallway", "kitchen", "office"})
_THINGS = frozenset({"apple", "football", "milk"})
_PERSONS = frozenset({"bill", "fred", "jeff", "mary"})

MAX_NEW_TOKENS = 20
_FILE = re.compile(r"(\d+[kKmM])_(qa\d+)\.jsonl(\.gz)?")


@dataclass(frozen=True)
class Question:
    """One of bAbI's question families: what it is about, a worked example, and the words that can be an answer."""

    about: str
    facts: str
    asked: str
    answer: str
    labels: frozenset[str]


QUESTIONS: dict[str, Question] = {
    "qa1": Question(
        "the place where a person is. A person is where they went last",
        "Anna moved to the hallway. Paul went to the garden. Anna went back to the office.",
        "Where is Anna?", "office", _PLACES,
    ),
    "qa2": Question(
        "the place where a thing is. A thing is with the person who took it, or where that person left it",
        "Anna went to the kitchen. Anna took the milk. Anna moved to the garden. Anna dropped the milk.",
        "Where is the milk?", "garden", _PLACES,
    ),
    "qa3": Question(
        "the place where a thing was before it was somewhere else. A thing moves with the person who carries it",
        "Paul took the apple. Paul went to the office. Paul moved to the bedroom. Paul dropped the apple.",
        "Where was the apple before the bedroom?", "office", _PLACES,
    ),
    "qa4": Question(
        "places that lie to the north, south, east or west of each other",
        "The garden is west of the kitchen. The office is west of the garden.",
        "What is west of the kitchen?", "garden", _PLACES,
    ),
    "qa5": Question(
        "who gave what to whom, the last time that it happened",
        "Mary took the milk. Mary gave the milk to Fred. Fred handed the milk to Bill.",
        "Who did Fred give the milk to?", "Bill", _PERSONS | _THINGS,
    ),
    "qa6": Question(
        "whether a person is in a place; say yes or no",
        "Anna moved to the hallway. Paul went to the garden.",
        "Is Anna in the garden?", "no", frozenset({"yes", "no"}),
    ),
    "qa7": Question(
        "how many things a person carries; say none, one, two or three",
        "Anna took the milk. Anna took the apple. Anna left the milk.",
        "How many objects is Anna carrying?", "one", frozenset({"none", "one", "two", "three"}),
    ),
    "qa8": Question(
        "which things a person carries; name them all with commas between them, or say nothing",
        "Anna took the milk. Anna took the apple. Paul took the football.",
        "What is Anna carrying?", "milk,apple", _THINGS | {"nothing"},
    ),
    "qa9": Question(
        "whether a person is in a place, where some sentences say where a person is not; say yes or no",
        "Anna is no longer in the hallway. Paul is in the garden.",
        "Is Anna in the hallway?", "no", frozenset({"yes", "no"}),
    ),
    "qa10": Question(
        "whether a person is in a place, where some sentences leave it open; say yes, no or maybe",
        "Anna is either in the hallway or the office. Paul is in the garden.",
        "Is Anna in the office?", "maybe", frozenset({"yes", "no", "maybe"}),
    ),
}  # fmt: skip

_PROMPT = (
    "Read the text and answer the question behind it. The question is about {about}. Only some sentences of the text "
    "matter for it. Give the answer alone, without a sentence.\n\n"
    "Example:\n{facts}\nQuestion: {asked}\nAnswer: {answer}\n\n"
    "Text:\n{text}"
)
_QUESTION = "\n\nQuestion: {asked}"


def named_labels(text: str, labels: Collection[str]) -> set[str]:
    """The labels that stand in a text as whole words, whatever the case."""
    return set(labels) & set(re.findall(r"\w+", text.lower()))


def is_right(target: str, question: str, prediction: str, labels: Collection[str]) -> bool:
    """Whether the first sentence of an answer names the target and no other label.

    Labels that stand in the question do not count: they are never the answer. A target with commas names several, all
    of which must be there. As published, but that a label has to be a whole word: "none" does not name "one".
    """
    sentence = prediction.lower().partition(".")[0].partition("question")[0]
    found = named_labels(sentence, labels) - named_labels(question, labels)
    return found == {part.strip() for part in target.lower().split(",")}


@dataclass(frozen=True)
class BabilongFile:
    """The questions of one family at one length of text, as the file's name says: 2k_qa1.jsonl or 2k_qa1.jsonl.gz."""

    family: str
    length: str
    records: Records


def _fault(family: str) -> Any:
    labels = QUESTIONS[family].labels
    texts = text_fault("input", "question", "target")

    def fault(record: dict[str, Any]) -> str | None:
        problem = texts(record)
        if problem:
            return problem
        if not {part.strip() for part in record["target"].lower().split(",")} <= labels:
            return f"has the target {record['target']!r}, which is no answer to a question of {family}"
        return None

    return fault


def read_babilong(
    folder: Path, families: Collection[str] = (), lengths: Collection[str] = (), skip_damaged: bool = False
) -> list[BabilongFile]:
    """The files of a folder, of these families and lengths where any are named, in order of family and length.

    Raises:
        DataError: no such folder or file, or damaged records that are not to be skipped.
        TaskError: an unknown family.
    """
    for family in families:
        if family not in QUESTIONS:
            raise TaskError(unknown_name("BABILong task", family, QUESTIONS))
    if not folder.is_dir():
        raise DataError(f"data folder {folder} does not exist; name a folder with files such as 1k_qa1.jsonl.")
    there = {
        (match[2], match[1].lower()): path
        for path in sorted(folder.iterdir())
        if (match := _FILE.fullmatch(path.name)) and match[2] in QUESTIONS
    }
    if not there:
        raise DataError(f"data folder {folder} holds no file such as 1k_qa1.jsonl or 1k_qa1.jsonl.gz.")
    lengths = [length.lower() for length in lengths]
    chosen = [
        (family, length)
        for family, length in there
        if (not families or family in families) and (not lengths or length in lengths)
    ]
    for family in families or ("",):
        for length in lengths or ("",):
            if not any(family in ("", found) and length in ("", of_length) for found, of_length in chosen):
                wanted = f"{length or 'LENGTH'}_{family or 'qaN'}.jsonl"
                raise DataError(f"data folder {folder} holds no {wanted} or {wanted}.gz.")
    chosen.sort(key=lambda pair: (int(pair[0][2:]), _words(pair[1])))
    return [
        BabilongFile(family, length, read_records(there[family, length], _fault(family), skip_damaged))
        for family, length in chosen
    ]


def _words(length: str) -> int:
    return int(length[:-1]) * (1000 if length.endswith("k") else 1_000_000)


@dataclass(frozen=True)
class BabilongTask:
    """The first `items_per_file` questions of every file of one family.

    Raises:
        TaskError: no item.
    """

    family: str
    files: tuple[BabilongFile, ...]
    items_per_file: int = 10

    def __post_init__(self) -> None:
        if self.items_per_file < 1:
            raise TaskError(f"{self.items_per_file} items leave nothing to ask; give at least 1.")

    @property
    def name(self) -> str:
        return f"babilong_{self.family}"

    def settings(self) -> dict[str, Any]:
        return {
            "items": self.items_per_file,
            "chance": 1 / len(QUESTIONS[self.family].labels),  # of a guess among the possible answers
            "files": [str(file.records.path) for file in self.files],
            "skipped_records": sum(len(file.records.damaged) for file in self.files),
        }

    def items(self, tokenizer: Any, chat: bool, seed: int) -> list[Item]:
        kind = QUESTIONS[self.family]
        items = []
        for file in self.files:
            for number, record in enumerate(file.records.rows[: self.items_per_file]):
                text = record["input"].strip()
                head = _PROMPT.format(
                    about=kind.about, facts=kind.facts, asked=kind.asked, answer=kind.answer, text=text
                )
                question = _QUESTION.format(asked=record["question"].strip())
                items.append(
                    Item(
                        item=f"{file.length}-{number}",
                        prompt=head + question,
                        references=(record["target"],),
                        max_new_tokens=MAX_NEW_TOKENS,
                        question=question,
                        cell={"text_length": file.length, "asked": record["question"].strip()},
                    )
                )
        return items

    def score(self, item: Item, prediction: str) -> tuple[float, bool]:
        (target,) = item.references
        right = is_right(target, str(item.cell["asked"]), prediction, QUESTIONS[self.family].labels)
        return float(right), right
