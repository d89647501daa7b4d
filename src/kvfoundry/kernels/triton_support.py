"""Triton, where it is installed: the one place that imports it, and what every kernel's launch asks about the device.

Modules named `fused` import from here, so that importing one without Triton is one clear sentence. On the CPU the
kernels run in Triton's interpreter only (environment variable TRITON_INTERPRET=1, set before the first import).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from kvfoundry.errors import KVFoundryError, MissingExtraError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingExtraError(
        "the fused kernels need Triton: pip install 'kvfoundry[kernels]' (Linux only); "
        "the reference functions need nothing."
    ) from error

__all__ = ["Tuning", "check_device", "dot_precision", "launches", "multiprocessors", "next_power", "tl", "triton"]

# Programs of one launch where there is no GPU: few, and more than one per head of a small test.
_INTERPRETED = 4


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def check_device(*tensors: Tensor | None) -> None:
    """Refuse tensors that no kernel can reach."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise KVFoundryError(f"a kernel reads one device, got tensors on {', '.join(sorted(map(str, devices)))}.")
    device = devices.pop()
    if device.type != "cuda" and not interpreted():
        raise KVFoundryError(
            f"Triton kernels need a CUDA device, got {device}; use the reference function, or set TRITON_INTERPRET=1 "
            "before the start to interpret them."
        )


P = ParamSpec("P")
R = TypeVar("R")


def launches(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function launch on the GPU of its first tensor that is on one: Triton launches on whichever is present.

    So the layers of a split model may each call it, whatever device the caller has chosen.
    """

    @wraps(function)
    def on_its_device(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next((each.device for each in args if isinstance(each, Tensor) and each.is_cuda), None)
        with nullcontext() if device is None else torch.cuda.device(device):
            return function(*args, **kwargs)

    return on_its_device


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return _INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count


def next_power(number: int, least: int = 1) -> int:
    """The smallest power of two that is at least both numbers."""
    return max(least, 1 << max(0, number - 1).bit_length())


def dot_precision(dtype: torch.dtype) -> str:
    """How tensor cores take operands of this dtype: float32 stays float32."""
    return "ieee" if dtype == torch.float32 else "tf32"


@dataclass(frozen=True)
class Tuning:
    """Shape of a launch: rows per tile, warps per program, tiles in flight, programs per multiprocessor.

    registers: of a thread at most, so that more programs fit (`coded_decode`); None: as many as the compiler likes.
    """

    block: int
    warps: int
    stages: int
    programs: int = 1
    registers: int | None = None
