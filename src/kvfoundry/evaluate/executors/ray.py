"""Answers by actors of Ray: on the cluster that RAY_ADDRESS names, or on one that is started on this machine.

Ray itself starts a dead actor again and asks it anew; what comes back comes back once.
"""

import os
import pickle
import re
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from kvfoundry.embedded import first_line
from kvfoundry.errors import KVFoundryError, MissingExtraError
from kvfoundry.evaluate.asking import Answers, Job, Work, answer
from kvfoundry.evaluate.executors.base import ATTEMPTS, Executor, ModelSource, Site, lost
from kvfoundry.evaluate.executors.processes import packed

# Seconds for an address to accept a connection and to answer as a cluster does, and for an actor to find its place and
# load the model.
_CONNECT, _ANSWER, _BEGIN = 10.0, 30.0, 600.0
# Bytes of the object store of a cluster of our own: prompts and result lines are all that goes through it.
_STORE = 128 * 1024 * 1024


class RayExecutor(Executor):
    """`count` actors with a model each; None takes as many as `ModelSource.workers` says.

    A model folder and data files must be there under the same name on every node, and kvfoundry installed.
    """

    def __init__(self, source: ModelSource, count: int | None = None) -> None:
        if count is not None and count < 1:
            raise KVFoundryError(f"{count} workers cannot do anything; give at least 1.")
        if source.names_one_gpu:
            raise KVFoundryError(
                f"--device {source.device} names one GPU of one machine, and ray gives every worker its own; "
                "use --device cuda."
            )
        self._source, self._count = source, count
        self._actors: list[Any] = []
        self._began_ray = False

    def start(self, job: Job) -> Site:
        ray = _ray()
        self._job = packed(job)
        if not ray.is_initialized():
            _init(ray)
            self._began_ray = True
        available, total = ray.available_resources(), ray.cluster_resources()
        gpus = int(total.get("GPU", 0))
        machines = sum(node["Alive"] and node["Resources"].get("GPU", 0) >= 1 for node in ray.nodes())
        self._count = self._count or self._source.workers(gpus, machines)
        each = self._source.gpus_each(gpus, self._count)
        if each * self._count > gpus:
            raise KVFoundryError(f"{self._count} workers want {each:g} GPUs each, ray has {gpus}; use fewer of them.")
        cpus = available.get("CPU", 1.0) / self._count
        self._options = {
            "num_gpus": each,
            "num_cpus": max(1, int(cpus)) if cpus >= 1 else round(cpus, 2),
            "max_restarts": -1,
            "max_task_retries": ATTEMPTS - 1,
        }
        self._actors = [self._begin()]
        site = self._first_word(ray)
        self._actors += [self._begin() for _ in range(1, self._count)]
        return Site(site.dtype, site.backend, {**site.machine, "workers": self._count})

    def _begin(self) -> Any:
        return _ray().remote(_Worker).options(**self._options).remote(self._source, self._job)

    def _first_word(self, ray: Any) -> Site:
        try:
            site = ray.get(self._actors[0].begin.remote(), timeout=_BEGIN)
        except ray.exceptions.GetTimeoutError as error:
            asked = ", ".join(f"{self._options[name]:g} {name[4:].upper()}" for name in ("num_cpus", "num_gpus"))
            raise KVFoundryError(
                f"no worker has begun within {_BEGIN:.0f} s: each asks for {asked}, free are "
                f"{ray.available_resources()}; use fewer workers, or free the cluster."
            ) from error
        except ray.exceptions.RayError as error:
            raise KVFoundryError(f"ray could not start a worker: {_reason(error)}") from error
        if isinstance(site, KVFoundryError):
            raise site
        assert isinstance(site, Site)
        return site

    def answers(self, works: Sequence[Work]) -> Iterator[tuple[Work, Answers]]:
        ray = _ray()
        waiting, idle = deque(works), list(self._actors)
        running: dict[Any, tuple[Any, Work]] = {}
        while waiting or running:
            while waiting and idle:
                actor, work = idle.pop(), waiting.popleft()
                running[actor.answer.remote(work)] = actor, work
            done, _ = ray.wait(list(running), num_returns=1)
            actor, work = running.pop(done[0])
            idle.append(actor)
            try:
                found = ray.get(done[0])
            except ray.exceptions.RayActorError:  # as often as it may be retried
                found = lost(work)
            except ray.exceptions.RayTaskError as error:  # a worker that cannot load what the first one could
                raise KVFoundryError(f"a worker failed: {_reason(error)}") from error
            yield work, found

    def close(self) -> None:
        ray = _ray()
        if not ray.is_initialized():
            return
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._began_ray:
            ray.shutdown()


class _Worker:
    """The actor: the model is loaded when it is first asked for anything."""

    def __init__(self, source: ModelSource, job: bytes) -> None:
        self._source, self._packed = source, job
        self._loaded: tuple[Any, Any, Job] | None = None

    def _load(self) -> tuple[Any, Any, Job]:
        if self._loaded is None:
            self._loaded = (*self._source.load(), pickle.loads(self._packed))
        return self._loaded

    def begin(self) -> Site | KVFoundryError:
        try:
            model, _, job = self._load()
            return Site.of(model, job.arms)
        except KVFoundryError as error:
            return type(error)(str(error))

    def answer(self, work: Work) -> Answers:
        return answer(*self._load(), work)


def _reason(error: BaseException) -> str:
    """What went wrong in a worker, without the traceback that Ray wraps it in."""
    cause = getattr(error, "cause", None)
    return first_line(error) if cause is None else f"{type(cause).__name__}: {first_line(cause)}"


def require_ray() -> None:
    """Say early that Ray is missing.

    Raises:
        MissingExtraError: it is.
    """
    _ray()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            f"--workers ray needs the package ray ({error}); install it with pip install 'kvfoundry[ray]'."
        ) from error
    return ray


def _init(ray: Any) -> None:
    """Join the cluster of RAY_ADDRESS, or start one here.

    Raises:
        KVFoundryError: nothing answers there, or Ray cannot start.
    """
    address = os.environ.get("RAY_ADDRESS", "").strip()
    quiet = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    try:
        if address and address != "local":
            _probe(address)
            ray.init(address=address, **quiet)
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(address="local", include_dashboard=False, object_store_memory=_STORE, **quiet)
    except KVFoundryError:
        raise
    except Exception as error:  # Ray raises many kinds here: ConnectionError, RuntimeError, ValueError, TimeoutError
        where = f"the cluster at RAY_ADDRESS={address}" if address else "a cluster on this machine"
        raise KVFoundryError(f"ray cannot use {where}: {first_line(error)}") from error


def _probe(address: str) -> None:
    """Refuse an address where nothing listens, or something that is no cluster: Ray itself would try for ever."""
    found = re.fullmatch(r"(ray://)?\[?([^\]/]+?)\]?:(\d+)/?", address)
    if found is None:
        return  # "auto" and the like are for Ray to resolve
    try:
        socket.create_connection((found[2], int(found[3])), timeout=_CONNECT).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise _no_cluster(address, reason) from error
    if found[1]:
        return  # what a Ray client asks there is bounded
    question = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        healthy = subprocess.run(question, capture_output=True, timeout=_ANSWER, check=False).returncode == 0
    except subprocess.TimeoutExpired as error:
        raise _no_cluster(address, f"something listens there, but said nothing for {_ANSWER:.0f} s") from error
    if not healthy:
        raise _no_cluster(address, "something else listens there")


def _no_cluster(address: str, reason: str) -> KVFoundryError:
    return KVFoundryError(
        f"no ray cluster answers at RAY_ADDRESS={address} ({reason}); correct it, or unset it to use this machine."
    )
