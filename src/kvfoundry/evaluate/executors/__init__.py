"""Where a run is answered: in this process, in several of this machine, or by Ray. One small file each."""

from kvfoundry.errors import KVFoundryError
from kvfoundry.evaluate.executors.base import Executor, ModelSource, Site
from kvfoundry.evaluate.executors.local import LocalExecutor

__all__ = ["Executor", "LocalExecutor", "ModelSource", "Site", "worker_executor"]

LOCAL, RAY = "local", "ray"


def worker_executor(workers: str, count: int | None, source: ModelSource) -> Executor | None:
    """The executor that `workers` names: a number of processes, or "ray" with `count` workers; None for "local".

    Raises:
        KVFoundryError: another name, a number out of range, a count without ray.
        MissingExtraError: ray is not installed.
    """
    if count is not None and workers != RAY:
        raise KVFoundryError("--worker-count is for --workers ray; with processes give their number: --workers 4.")
    if workers == LOCAL:
        return None
    if workers == RAY:
        from kvfoundry.evaluate.executors.ray import RayExecutor, require_ray

        require_ray()
        return RayExecutor(source, count)
    from kvfoundry.evaluate.executors.processes import ProcessExecutor

    try:
        number = int(workers)
    except ValueError as error:
        raise KVFoundryError(
            f"unknown --workers {workers!r}; give local, ray, or a number of processes such as 4."
        ) from error
    return ProcessExecutor(source, number)
