"""One decode step of a model: the same code as a plain call, or recorded in a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvfoundry import compat
from kvfoundry.engine.layer import StaticCache
from kvfoundry.engine.sampling import Sampler

# Steps before a graph is recorded: they compile kernels and fill the workspaces of libraries. They are real steps.
_WARM_UP = 2


class Program:
    """Everything that a step reads and writes lies still: token, position, rows, the state of the sampler.

    ids: [batch, 1], the newest token of every sequence; position: [batch], its index. said: logits of the last step,
    [batch, vocabulary]. note: why there is no graph where one was to be recorded.
    """

    def __init__(
        self, forward: Callable[..., Any], cache: StaticCache, sampler: Sampler, ids: Tensor, position: Tensor,
        *, graph: bool,
    ):  # fmt: skip
        self.cache, self.sampler = cache, sampler
        self.ids, self.position = ids, position
        self.note: str | None = None
        self.said: Tensor | None = None
        self._forward = forward
        # A mask of four dimensions is taken as ready; our attention does not look at it.
        self._mask = torch.ones(ids.shape[0], 1, 1, 1, dtype=torch.bool, device=ids.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0
        self._records = graph
        self._stream = torch.cuda.Stream(ids.device) if graph else None

    def advance(self) -> None:
        """Compute the next token of every sequence into `ids`."""
        if not self._records:
            self._step()
        elif self._steps < _WARM_UP:
            self._warm_up()
        else:
            if self._graph is None:
                self._record()
            else:
                self.cache.repeated()
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        self._steps += 1
        self.cache.after_step()

    @property
    def is_recorded(self) -> bool:
        """Whether steps are replays of a graph by now."""
        return self._graph is not None

    def logits(self) -> Tensor:
        """What the model says of the newest token: [batch, vocabulary]."""
        with self.cache:
            output = self._forward(
                input_ids=self.ids, attention_mask=self._mask, position_ids=self.position[:, None], use_cache=True,
                **{compat.CACHE_ARGUMENT: self.cache},
            )  # fmt: skip
        logits: Tensor = output.logits[:, -1]
        return logits

    def _step(self) -> None:
        self.said = self.logits()
        token = self.sampler(self.said)
        self.ids.copy_(token[:, None])
        self.position += 1

    def _warm_up(self) -> None:
        assert self._stream is not None
        current = torch.cuda.current_stream(self.ids.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._step()
        current.wait_stream(self._stream)

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads (a streamer's, say) may use the device meanwhile
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._step()
        except Exception as error:
            self._records = False
            self.note = f"the step cannot be recorded in a CUDA graph ({_first_line(error)}), so it runs without"
            return
        self._graph = graph


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
