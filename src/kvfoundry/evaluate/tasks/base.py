"""What a task is: a list of items, each a prompt with its references, and a score for a prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from kvfoundry.errors import KVFoundryError


class TaskError(KVFoundryError):
    """Task settings that cannot be measured, for example a length that the needle alone exceeds."""


@dataclass(frozen=True)
class Item:
    """One question of a task.

    Attributes:
        item: name of the item, unique inside its task and the same in every run with the same settings.
        prompt: user text, before any chat template.
        references: the answers; a task decides in `score` whether one or all are needed.
        question: what the prompt ends with and a method may not see when it has to act on the text alone.
        answer_prefix: how the answer begins, put after the chat template's generation prompt for the model to go on;
            part of the prompt's tokens and, like the question, nothing that a method sees of a text alone.
        chat: whether the prompt goes into the chat template; None leaves it to the run.
        line_ends: a line break ends the answer.
        notes: what a reader of the score has to know, such as that it compares with no published one.
        cell: where the item stands in the task's grid, such as {"length": 2048, "depth": 50.0}; goes into the results.
    """

    item: str
    prompt: str
    references: tuple[str, ...]
    max_new_tokens: int
    question: str = ""
    answer_prefix: str = ""
    chat: bool | None = None
    line_ends: bool = False
    notes: tuple[str, ...] = ()
    cell: Mapping[str, float | int | str] = field(default_factory=dict)


class Questions(Protocol):
    """The data of a task; `settings` is everything that decides its items."""

    @property
    def name(self) -> str: ...

    def settings(self) -> dict[str, Any]:
        """JSON values; two runs with equal settings have equal items."""
        ...

    def items(self, tokenizer: Any, chat: bool, seed: int) -> Sequence[Item]:
        """The items; lengths are in tokens of `tokenizer`, the chat template included when `chat`."""
        ...


class Task(Questions, Protocol):
    """A task whose items are asked: data plus one pure metric."""

    def score(self, item: Item, prediction: str) -> tuple[float, bool]:
        """Graded score in [0, 1] and exact match."""
        ...


@runtime_checkable
class MeasuredTask(Questions, Protocol):
    """A task that measures a method on its items itself, where an answer would say too little."""

    def measure(
        self, model: Any, tokenizer: Any, method: Any, items: Sequence[Item], prefill_chunk: int | None
    ) -> list[dict[str, Any]]:
        """For each item the fields of its result line that are found by measuring, the score among them."""
        ...


@runtime_checkable
class ScoringTask(Task, Protocol):
    """A task that has more than one score of a prediction."""

    def more_scores(self, item: Item, prediction: str) -> dict[str, float]:
        """Further fields of the result line, each in [0, 1]; the summary has their means."""
        ...
