"""The contract of an executor: where the pieces of a run are answered. The runner does not know."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

import kvfoundry
from kvfoundry.attention import backend_of
from kvfoundry.evaluate.asking import Answers, Job, Work, failed
from kvfoundry.evaluate.machine import describe
from kvfoundry.models import load

# How often a piece of work may take its worker down with it before its items count as failed.
ATTEMPTS = 3


@dataclass(frozen=True)
class Site:
    """Where a run is answered, for its record. machine: see `machine.describe`."""

    dtype: str
    backend: str
    machine: dict[str, Any]

    @classmethod
    def of(cls, model: Any, arms: Sequence[Any]) -> Self:
        """The site of a loaded model; refuses, before any prompt runs, an arm that it cannot serve."""
        for arm in arms:
            kvfoundry.KVCache(model, arm)
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        return cls(dtype, backend_of(model), describe(model))


@dataclass(frozen=True)
class ModelSource:
    """How a worker gets its model: the arguments of `kvfoundry.load`."""

    name: str
    device: str = "auto"
    dtype: str = "auto"
    attn_implementation: str = "sdpa"

    def load(self) -> tuple[Any, Any]:
        return load(self.name, device=self.device, dtype=self.dtype, attn_implementation=self.attn_implementation)

    @property
    def names_one_gpu(self) -> bool:
        """Whether it asks for one certain GPU, so that there is no choice to make for a worker."""
        return self.device.startswith("cuda:")

    @property
    def takes_gpus(self) -> bool:
        """Whether a worker needs GPUs of its own where there are any."""
        return self.device in ("auto", "auto-map", "cuda")

    def workers(self, gpus: int, machines: int) -> int:
        """Workers where nobody says how many: one per GPU, one per machine with GPUs for a split model, else two."""
        if not self.takes_gpus or gpus == 0:
            return 2
        return max(1, machines) if self.device == "auto-map" else gpus

    def gpus_each(self, gpus: int, workers: int) -> float:
        """GPUs of each worker when so many are there: one, a share of one, or for a split model as many as fit."""
        if not self.takes_gpus or gpus == 0:
            return 0
        if self.device == "auto-map":
            return max(1, gpus // workers)
        return 1 if workers <= gpus else gpus / workers


class Executor(ABC):
    """Answers pieces of work. Used as a context manager: on exit, whatever it has started is gone."""

    @abstractmethod
    def start(self, job: Job) -> Site:
        """Get ready for this job.

        Raises:
            KVFoundryError: workers that cannot start, a model that cannot be loaded, an arm that it cannot serve.
        """

    @abstractmethod
    def answers(self, works: Sequence[Work]) -> Iterator[tuple[Work, Answers]]:
        """Every piece of work exactly once with its answers, in the order in which they are done."""

    @abstractmethod
    def close(self) -> None:
        """End what was started. Called once, also after an exception."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lost(work: Work) -> Answers:
    """The answers to work that no worker survives."""
    reason = f"WorkerDied: {ATTEMPTS} workers ended while they were at this batch (out of memory?)"
    return [[failed(reason) for _ in work.questions] for _ in work.arms]


def share_threads(workers: int, cores: int) -> None:
    """Let this process use its share of the cores alone, or workers on one machine get into each other's way."""
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores // workers)))
