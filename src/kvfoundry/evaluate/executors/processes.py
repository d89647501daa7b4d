"""Answers in several processes of this machine, each with a model of its own. A worker that dies is replaced."""

import multiprocessing
import os
import pickle
import signal
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from kvfoundry.errors import KVFoundryError
from kvfoundry.evaluate.asking import Answers, Job, Work, answer
from kvfoundry.evaluate.executors.base import ATTEMPTS, Executor, ModelSource, Site, lost, share_threads

_SPAWN = multiprocessing.get_context("spawn")
_CANNOT_LOAD = "a worker ended while it loaded the model (out of memory?); use fewer of them."


@dataclass
class _Worker:
    """One process, our end of its pipe, its place among the workers, and what it is at."""

    process: SpawnProcess
    pipe: Connection
    place: int
    work: Work | None = None


class ProcessExecutor(Executor):
    """`count` processes. GPUs are shared out among them, cores too."""

    def __init__(self, source: ModelSource, count: int) -> None:
        if count < 1:
            raise KVFoundryError(f"{count} workers cannot do anything; give at least 1.")
        self._source, self._count = source, count
        self._workers: list[_Worker] = []

    def start(self, job: Job) -> Site:
        self._job = packed(job)
        # The first one alone says whether model and methods go together; the others load while it answers.
        self._workers = [self._begin(0)]
        try:
            site = self._workers[0].pipe.recv()
        except (EOFError, OSError) as error:
            raise KVFoundryError(_CANNOT_LOAD) from error
        if isinstance(site, KVFoundryError):
            raise site
        assert isinstance(site, Site)
        return Site(site.dtype, site.backend, {**site.machine, "workers": self._count})

    def _begin(self, place: int) -> _Worker:
        ours, theirs = _SPAWN.Pipe()
        gpus = _gpus_of(self._source, place, self._count)
        arguments = (theirs, self._source, self._job, self._count)
        process = _SPAWN.Process(target=_serve, args=arguments, daemon=True, name=f"kvfoundry-worker-{place}")
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        try:
            if gpus is not None:  # read when the process first asks for a GPU, which may be at an import
                os.environ["CUDA_VISIBLE_DEVICES"] = gpus
            process.start()
        finally:
            if gpus is not None:
                os.environ.pop("CUDA_VISIBLE_DEVICES")
                if before is not None:
                    os.environ["CUDA_VISIBLE_DEVICES"] = before
        theirs.close()  # so that its death ends the pipe
        return _Worker(process, ours, place)

    def answers(self, works: Sequence[Work]) -> Iterator[tuple[Work, Answers]]:
        waiting, died_at = deque(works), Counter[int]()
        died_idle = 0  # one after the other, none of them at work
        ready = {0}  # places of workers that have said so
        self._workers += [self._begin(place) for place in range(1, min(self._count, len(works)))]
        while waiting or any(worker.work is not None for worker in self._workers):
            for worker in self._workers:
                if waiting and worker.work is None and worker.place in ready:
                    worker.work = waiting.popleft()
                    self._send(worker)
            for pipe in wait([worker.pipe for worker in self._workers]):
                worker = next(worker for worker in self._workers if worker.pipe is pipe)
                try:
                    message = worker.pipe.recv()
                except (EOFError, OSError):
                    ready.discard(worker.place)
                    self._end(worker)
                    if worker.work is None:
                        died_idle += 1
                        if died_idle == ATTEMPTS:
                            raise KVFoundryError(_CANNOT_LOAD) from None
                    elif (deaths := died_at[id(worker.work)] + 1) < ATTEMPTS:
                        died_at[id(worker.work)] = deaths
                        waiting.appendleft(worker.work)
                    else:
                        yield worker.work, lost(worker.work)
                    self._workers[self._workers.index(worker)] = self._begin(worker.place)
                    continue
                if isinstance(message, KVFoundryError):
                    raise message
                if isinstance(message, Site):
                    ready.add(worker.place)
                    died_idle = 0
                    continue
                work, worker.work = worker.work, None
                assert work is not None
                yield work, message

    def _send(self, worker: _Worker) -> None:
        with suppress(OSError):  # it is dead, which the next look at its pipe tells
            worker.pipe.send(worker.work)

    def close(self) -> None:
        for worker in self._workers:
            self._end(worker)
        self._workers = []

    @staticmethod
    def _end(worker: _Worker) -> None:
        worker.pipe.close()
        worker.process.kill()  # it holds nothing that would have to be saved
        worker.process.join()


def packed(job: Job) -> bytes:
    """The job as it is sent to workers.

    Raises:
        KVFoundryError: a task or a method that cannot be sent.
    """
    try:
        return pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise KVFoundryError(
            f"these tasks or methods cannot be sent to other processes ({error}); use --workers local."
        ) from error


def _gpus_of(source: ModelSource, place: int, count: int) -> str | None:
    """The value of CUDA_VISIBLE_DEVICES for a worker; None leaves it as it is."""
    if not source.takes_gpus or not torch.cuda.is_available():
        return None
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    visible = given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]
    each = int(max(1, source.gpus_each(len(visible), count)))
    return ",".join(visible[(place * each + number) % len(visible)] for number in range(each))


def _serve(pipe: Connection, source: ModelSource, packed: bytes, count: int) -> None:
    """The life of a worker: load the model, say where it is, answer until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started us
    share_threads(count, os.cpu_count() or 1)
    try:
        model, tokenizer = source.load()
        job: Job = pickle.loads(packed)
        pipe.send(Site.of(model, job.arms))
    except KVFoundryError as error:
        pipe.send(_plain(error))
        return
    while True:
        try:
            work: Any = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(answer(model, tokenizer, job, work))


def _plain(error: KVFoundryError) -> KVFoundryError:
    """The error without what hangs on it, which may not fit through a pipe."""
    return type(error)(str(error))
