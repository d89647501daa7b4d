"""Servers and a Redis that tests of one module share."""

from __future__ import annotations

from pathlib import Path

import pytest
from chunks.redis_server import Server as Redis

from .servers import Server


@pytest.fixture(scope="session")
def model() -> Path:
    import kvfoundry

    return Path(kvfoundry.load("smollm2")[0].config._name_or_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def redis(folder):
    server = Redis(folder)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def start(model, folder):
    """Starts servers; `start.stop()` ends those that still run."""
    running: list[Server] = []

    def stop() -> None:
        while running:
            running.pop().stop()

    def begin(name: str, settings, *more: str, dtype: str = "float32", other: Path = model) -> Server:
        """other: what is served in place of the embedded model."""
        running.append(Server(other, folder / f"{name}.log", settings, *more, dtype=dtype))
        return running[-1]

    begin.stop = stop
    yield begin
    stop()


@pytest.fixture(autouse=True)
def _no_server_outlives_its_test(request):
    """A test that fails leaves its servers running."""
    begin = request.getfixturevalue("start") if "start" in request.fixturenames else None
    yield
    if begin is not None:
        begin.stop()
