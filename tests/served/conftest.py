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
    """Starts servers, at most a few at once, and stops what is left at the end."""
    running: list[Server] = []

    def begin(name: str, settings, *more: str, dtype: str = "float32", other: Path = model) -> Server:
        """other: what is served in place of the embedded model."""
        running.append(Server(other, folder / f"{name}.log", settings, *more, dtype=dtype))
        return running[-1]

    yield begin
    for server in running:
        server.stop()
