"""Processes and Ray leave the results of the local runner, also when workers are killed in the middle of a run."""

import importlib.util
import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvfoundry.evaluate.executors import ModelSource, worker_executor
from kvfoundry.evaluate.results import RESULTS, read_lines, read_meta
from kvfoundry.evaluate.runner import evaluate
from kvfoundry.evaluate.tasks.base import Item
from kvfoundry.evaluate.tasks.niah import NeedleTask
from kvfoundry.models import load, outline

TIMES = ("ttft_seconds", "ms_per_token", "seconds")
METHODS, BUDGETS = ["fullkv", "snapkv(window=8)", "h2o(window=8)"], [24, 0.5]
NEEDLES = NeedleTask(lengths=(90, 120), depths=(0.0, 50.0, 100.0), repeats=2, max_new_tokens=2)

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'kvfoundry[ray]'"
)


@dataclass(frozen=True)
class Deadly:
    """Needles, and a folder of orders: who scores an item that has one takes it and dies, without a word.

    An order is a file with the item's name, and holds how many workers are to die of it.
    """

    orders: Path | None = None

    name = NEEDLES.name

    def settings(self):
        return NEEDLES.settings()

    def items(self, tokenizer, chat, seed):
        return NEEDLES.items(tokenizer, chat, seed)

    def score(self, item: Item, prediction: str):
        order = None if self.orders is None else self.orders / item.item
        if order is not None and order.exists():
            left = int(order.read_text()) - 1
            order.write_text(str(left)) if left else order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return NEEDLES.score(item, prediction)


def timeless(folder):
    return [{name: value for name, value in line.items() if name not in TIMES} for line in read_lines(folder / RESULTS)]


@pytest.fixture(scope="module")
def loaded(model_folder):
    return load(model_folder)


@pytest.fixture(scope="module")
def expected(loaded, tmp_path_factory):
    """The lines of the local runner, times apart."""
    out = tmp_path_factory.mktemp("local") / "out"
    evaluate(*loaded, [Deadly()], METHODS, budgets=BUDGETS, batch_size=3, out=out)
    return timeless(out)


@pytest.fixture
def orders(tmp_path):
    """The next worker that comes to a certain item is to die."""
    folder = tmp_path / "orders"
    folder.mkdir()
    (folder / "word-n1-L120-D0-0").write_text("1")
    return folder


def run(workers, count, model_folder, orders, out, **options):
    executor = worker_executor(workers, count, ModelSource(str(model_folder), "cpu"))
    return evaluate(
        *outline(model_folder), [Deadly(orders)], METHODS, budgets=BUDGETS, batch_size=3, out=out, executor=executor,
        **options,
    )  # fmt: skip


def test_processes_lose_nothing_when_workers_die_and_a_run_goes_on_without_them(
    expected, loaded, model_folder, orders, tmp_path
):
    out, order = tmp_path / "out", next(orders.iterdir())

    def interrupt(progress):
        if not order.exists() and progress.done > 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("2", None, model_folder, orders, out, on_progress=interrupt)
    lines = timeless(out)
    assert 30 < len(lines) < len(expected) and all(line in expected for line in lines)
    assert read_meta(out)["machine"]["workers"] == 2
    evaluate(*loaded, [Deadly()], METHODS, budgets=BUDGETS, batch_size=3, out=out, resume=True)
    assert timeless(out) == expected


@pytest.mark.parametrize(
    ("device", "gpus", "machines", "workers", "each"),
    [("auto", 8, 2, 8, 1), ("cuda", 3, 1, 3, 1), ("auto-map", 8, 2, 2, 4), ("auto-map", 4, 1, 1, 4),
     ("auto", 0, 0, 2, 0), ("auto-map", 0, 0, 2, 0), ("cpu", 8, 1, 2, 0)],
)  # fmt: skip
def test_a_split_model_gets_the_gpus_of_a_machine(
    device: str, gpus: int, machines: int, workers: int, each: int
) -> None:
    source = ModelSource("smollm2", device=device)
    assert source.workers(gpus, machines) == workers
    assert source.gpus_each(gpus, workers) == each


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_work_that_no_process_survives_fails_and_the_rest_is_done(
    expected, loaded, model_folder, orders, tmp_path, monkeypatch
):
    out, order = tmp_path / "out", next(orders.iterdir())
    order.write_text("3")
    monkeypatch.setattr("kvfoundry.evaluate.executors.processes._SPAWN", multiprocessing.get_context("fork"))
    assert run("1", None, model_folder, orders, out).failed == 3  # the batch of the first method that had the item
    failed = [line for line in read_lines(out / RESULTS) if line.get("error")]
    assert len(timeless(out)) == len(expected) and {line["method"] for line in failed} == {"fullkv"}
    assert all("WorkerDied" in line["error"] for line in failed)
    evaluate(*loaded, [Deadly()], METHODS, budgets=BUDGETS, batch_size=3, out=out, resume=True)
    assert timeless(out) == expected


@needs_ray
@pytest.mark.slow
def test_ray_loses_nothing_when_workers_die(expected, model_folder, orders, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # Its workers find the task above as they would find an installed one.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    assert run("ray", 2, model_folder, orders, tmp_path / "out").failed == 0
    assert not list(orders.iterdir())
    assert timeless(tmp_path / "out") == expected
    assert read_meta(tmp_path / "out")["machine"]["workers"] == 2
