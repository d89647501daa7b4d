"""How fast bytes move, within a device, to and from pinned host memory and a disk; and how fast it multiplies."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvfoundry.bench.timing import now, step_times
from kvfoundry.errors import DataError

_ROUNDS = 7


def copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a copy that no cache holds."""
    big = torch.empty(1 << (30 if device.type == "cuda" else 28), dtype=torch.uint8, device=device)
    target = torch.empty_like(big)
    return 2 * big.nbytes / _alone(lambda: target.copy_(big), device)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large product of matrices."""
    size = 8192 if device.type == "cuda" else 768
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    torch.mm(a, b)
    return 2 * size**3 / _alone(lambda: torch.mm(a, b), device)


def link_rate(device: torch.device, *, back: bool = False) -> float:
    """Bytes per second of one large copy from pinned host memory to the device, or back."""
    cuda = device.type == "cuda"
    here = torch.empty(1 << (30 if cuda else 26), dtype=torch.uint8, pin_memory=cuda)
    there = torch.empty_like(here, device=device)
    source, target = (there, here) if back else (here, there)
    return here.nbytes / _alone(lambda: target.copy_(source, non_blocking=True), device)


def link_rates(device: torch.device) -> dict[str, float]:
    """Both ways between the host and a device of its own; {} where they are one."""
    if device.type == "cpu":
        return {}
    return {"host_to_device": link_rate(device), "device_to_host": link_rate(device, back=True)}


def disk_rates(folder: Path, nbytes: int = 1 << 26) -> dict[str, float]:
    """Bytes per second of a file in the folder: written and flushed to the disk, and read from it.

    Where the system can be told so, it forgets the file in between; else the read is that of its memory, and named so.
    Raises DataError where nothing can be written there.
    """
    content = os.urandom(1 << 20) * (nbytes >> 20)
    forgets = hasattr(os, "posix_fadvise")
    written, read = [], []
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".rate-") as file:
            for _ in range(3):
                written.append(_seconds(lambda: _write(file, content)))
                if forgets:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                file.seek(0)
                read.append(_seconds(file.read))
    except OSError as error:
        raise DataError(
            f"the folder {str(folder)!r} cannot be written ({error.strerror}); name another with --out."
        ) from error
    name = "disk_read" if forgets else "disk_read_from_memory"
    return {"disk_write": nbytes / statistics.median(written), name: nbytes / statistics.median(read)}


def _write(file: Any, content: bytes) -> None:
    file.seek(0)
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _alone(call: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of a call that starts when the last one has ended."""
    found = []
    for _ in range(_ROUNDS):
        found += step_times(call, 1, device)
        now(device)
    return statistics.median(found)
