"""Answers in this process, one piece of work after the other."""

from collections.abc import Iterator, Sequence
from typing import Any

from kvfoundry.evaluate.asking import Answers, Job, Work, answer
from kvfoundry.evaluate.executors.base import Executor, Site


class LocalExecutor(Executor):
    """The model that was loaded already."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer

    def start(self, job: Job) -> Site:
        self._job = job
        return Site.of(self._model, job.arms)

    def answers(self, works: Sequence[Work]) -> Iterator[tuple[Work, Answers]]:
        for work in works:
            yield work, answer(self._model, self._tokenizer, self._job, work)

    def close(self) -> None:
        """Nothing was started."""
