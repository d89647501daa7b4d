"""The scheduler's side: which spans of a prompt are in the store, which a step loads, and which it makes ready to save.

The unit is a span of a prompt: `span` tokens, on a grid from the prompt's start, under the key of its tokens behind all
tokens in front of them. So an entry is exact wherever it is used, a prefix of any length is found without an index, and
a hit compares every token from the first one on. Tokens behind the last whole span, and what the model answers, are not
stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvfoundry.integrations.vllm.messages import Job, Tenant, Work

# Whether the store has tokens start to stop of a prompt.
Holds = Callable[[Tenant, list[int], int, int], bool]
# A request that waits for room is looked up again after so many seconds.
_FRESH = 1.0


@dataclass
class RequestState:
    """One request of vLLM. found: tokens from the start that the store has; saved: up to which spans are dealt with."""

    tenant: Tenant
    tokens: list[int]
    found: int = 0
    looked: float = -1e9
    saved: int = 0
    blocks: list[int] = field(default_factory=list)
    load: Job | None = None
    loading: Job | None = None
    barred: bool = False


class Planner:
    """span: tokens of an entry, a multiple of block_size. holds: asks the store; it must not wait long.

    served: whose rows a request's are, None for one that is left alone. clock: seconds, for tests.
    """

    def __init__(
        self,
        span: int,
        block_size: int,
        holds: Holds,
        served: Callable[[Any], Tenant | None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.span, self.block_size = span, block_size
        self._holds, self._served, self._clock = holds, served, clock
        self._requests: dict[str, RequestState] = {}

    def _state(self, request: Any) -> RequestState | None:
        known = self._requests.get(request.request_id)
        if known is None:
            tenant = self._served(request)
            if tenant is None:
                return None
            known = self._requests[request.request_id] = RequestState(tenant, list(request.prompt_token_ids))
        return known

    # As vLLM asks: once or more often before a request is scheduled, and again after it was preempted.

    def matched(self, request: Any, computed: int) -> int:
        """Tokens behind the `computed` ones that a load would bring; at least one token is left to be computed."""
        state = self._state(request)
        if state is None or state.barred:
            return 0
        now = self._clock()
        if now - state.looked > _FRESH:
            state.found, state.looked = self._found(state), now
        usable = min(state.found, (len(state.tokens) - 1) // self.span * self.span)
        return max(0, usable - computed)

    def _found(self, state: RequestState) -> int:
        stop = self.span
        while stop <= len(state.tokens) and self._holds(state.tenant, state.tokens, stop - self.span, stop):
            stop += self.span
        return stop - self.span

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """Blocks were given to a request; the last `external` tokens of what it has computed are to be loaded."""
        state = self._requests.get(request.request_id)
        if state is None or external <= 0:
            return
        stop = min(state.found, (len(state.tokens) - 1) // self.span * self.span)
        first = stop - external
        spans = tuple((at, at + self.span) for at in range(first // self.span * self.span, stop, self.span))
        needed = -(-stop // self.block_size)
        state.load = Job(request.request_id, state.tenant, state.tokens[:stop], spans, tuple(blocks[:needed]), first)

    def step(self, output: Any) -> Work:
        """What the workers have to do in this step. output: vLLM's SchedulerOutput."""
        loads = []
        for state in self._requests.values():
            if state.load is not None:
                loads.append(state.load)
                state.loading, state.load = state.load, None
        saves: list[Job] = []
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            known = self._requests.get(new.req_id)
            if known is not None:
                known.blocks = list(new.block_ids[0])
                saves += self._ready(new.req_id, known, new.num_computed_tokens + scheduled.get(new.req_id, 0))
        again = output.scheduled_cached_reqs
        for place, name in enumerate(again.req_ids):
            known = self._requests.get(name)
            if known is None:
                continue
            more = again.new_block_ids[place]
            if name in again.resumed_req_ids:
                known.blocks = []
            known.blocks += more[0] if more is not None else ()
            saves += self._ready(name, known, again.num_computed_tokens[place] + scheduled.get(name, 0))
        return Work(tuple(loads), tuple(saves))

    def _ready(self, name: str, state: RequestState, computed: int) -> list[Job]:
        """The spans that are whole after this step and that the store is not known to have."""
        begin = max(state.saved, state.found) // self.span * self.span
        stop = min(computed, len(state.tokens)) // self.span * self.span
        if stop <= begin or len(state.blocks) * self.block_size < stop:
            return []
        state.saved = stop
        spans = tuple((at, at + self.span) for at in range(begin, stop, self.span))
        blocks = tuple(state.blocks[: stop // self.block_size])
        return [Job(name, state.tenant, state.tokens[:stop], spans, blocks)]

    # Afterwards.

    def failed(self, blocks: Iterable[int]) -> list[Job]:
        """Blocks that a load could not fill: their requests are computed from there on, and not loaded again."""
        lost, jobs = set(blocks), []
        for state in self._requests.values():
            job = state.loading
            if job is None or not lost.intersection(job.blocks):
                continue
            first = next(place for place, block in enumerate(job.blocks) if block in lost)
            state.found = first * self.block_size // self.span * self.span
            state.barred, state.loading = True, None
            jobs.append(job)
        return jobs

    def finished(self, request_id: str) -> None:
        """The request is over, answered or cancelled."""
        self._requests.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._requests)
