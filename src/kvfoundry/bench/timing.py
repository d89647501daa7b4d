"""How time is taken: steps that follow each other on a device, and tokens of `generate` as they become ready."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteria


def now(device: torch.device) -> float:
    """Seconds, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def step_times(step: Callable[[], Any], count: int, device: torch.device) -> list[float]:
    """Seconds of every one of `count` steps that follow each other without a pause."""
    if device.type != "cuda":
        found = []
        for _ in range(count):
            began = time.perf_counter()
            step()
            found.append(time.perf_counter() - began)
        return found
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(then) / 1e3 for first, then in pairwise(events)]


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Median, tenth and ninetieth percentile in milliseconds, and how many there are. times: seconds."""
    in_order = sorted(times)
    return {
        "ms": statistics.median(times) * 1e3,
        "ms_p10": in_order[len(times) // 10] * 1e3,
        "ms_p90": in_order[len(times) * 9 // 10] * 1e3,
        "steps": len(times),
    }


class Clock(StoppingCriteria):
    """When each token of `generate` is ready. Never stops anything.

    at_first: called when the first token is ready, after its time is taken.
    """

    def __init__(self, device: torch.device, at_first: Callable[[], None] | None = None):
        self.device, self.times, self._at_first = device, list[float](), at_first

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter() if self.times else now(self.device))
        if len(self.times) == 1 and self._at_first is not None:
            self._at_first()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def steps(self, skip: int, last: int = 0) -> list[float]:
        """Seconds between tokens, the first `skip` and the last `last` steps left out."""
        return [then - first for first, then in pairwise(self.times[skip : len(self.times) - last])]
