"""A real Redis for tests: started on a free port, stopped, hung and brought back by its process id."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One redis-server process; its data live in a folder of their own."""

    def __init__(self, folder: Path, *options: str):
        self.port, self._folder, self._options = free_port(), folder, options
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command += ["--save", "", "--appendonly", "no", *self._options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.2):
                return
            time.sleep(0.02)
        raise RuntimeError("redis-server did not come up")

    def hang(self) -> None:
        """Accept connections and answer nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Gone, with everything that it held."""
        self.process.kill()
        self.process.wait()


def redis_is_here() -> bool:
    return shutil.which("redis-server") is not None and importlib.util.find_spec("redis") is not None


@contextlib.contextmanager
def running_redis(*options: str) -> Iterator[Server | None]:
    """A server for the block; None where no redis-server binary or no redis-py is found."""
    if not redis_is_here():
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), *options)
        try:
            yield server
        finally:
            server.wake()
            server.stop()
