"""The scheduler's side: which spans of a prompt are in the store, which a step loads, and which it makes ready to save.

The unit is a span of a prompt: `span` tokens, on a grid from the prompt's start, under the key of its tokens behind all
tokens in front of them. So an entry is exact wherever it is used, a prefix of any length is found without an index, and
a hit compares every token from the first one on. Tokens behind the last whole span, and what the model answers, are not
stored. A prompt with marked documents has their boundaries in place of the grid (see `documents.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvfoundry.integrations.vllm.messages import Job, Prompt, Span, Tenant, Work

# Whether the store has a span of a prompt.
Holds = Callable[[Prompt, Span], bool]
# A request that waits for room is looked up again after so many seconds.
_FRESH = 1.0


@dataclass
class RequestState:
    """One request of vLLM. spans: what its prompt is cut into, from its start on.

    found: spans from the first one on that the store has; saved: those that need not be saved any more. approximate:
    tokens of spans read elsewhere that it was scheduled with, loaded or from vLLM's own cache.
    """

    prompt: Prompt
    spans: list[Span]
    found: int = 0
    looked: float = -1e9
    saved: int = 0
    blocks: list[int] = field(default_factory=list)
    load: Job | None = None
    loading: Job | None = None
    barred: bool = False
    approximate: int = 0


class Planner:
    """span: tokens of an entry, a multiple of block_size. holds: asks the store; it must not wait long.

    served: whose rows a request's are, None for one that is left alone. marked: the spans of a request with marked
    documents, None for all others. repairs: whether documents at other places are repaired, which takes all of them and
    what is asked. clock: seconds, for tests.
    """

    def __init__(
        self,
        span: int,
        block_size: int,
        holds: Holds,
        served: Callable[[Any], Tenant | None],
        marked: Callable[[Any], list[Span] | None] = lambda _: None,
        repairs: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.span, self.block_size = span, block_size
        self._holds, self._served, self._marked, self._clock = holds, served, marked, clock
        self._repairs = repairs
        self._requests: dict[str, RequestState] = {}

    def _state(self, request: Any) -> RequestState | None:
        known = self._requests.get(request.request_id)
        if known is None:
            tenant = self._served(request)
            if tenant is None:
                return None
            prompt = Prompt(tenant, request.prompt_token_ids)
            spans = self._marked(request)
            if spans is None:
                ends = range(self.span, len(prompt) + 1, self.span)
                spans = [Span(stop - self.span, stop, stop - self.span) for stop in ends]
            known = self._requests[request.request_id] = RequestState(prompt, spans)
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
        return max(0, self._reach(state) - computed)

    def _found(self, state: RequestState) -> int:
        for number, span in enumerate(state.spans):
            if not self._holds(state.prompt, span):
                return number
        return len(state.spans)

    def _reach(self, state: RequestState) -> int:
        """Up to which token a load can come: whole spans, whole blocks, and not the last token."""
        stops = [span.stop for span in state.spans[: state.found] if span.stop < len(state.prompt)]
        return stops[-1] // self.block_size * self.block_size if stops else 0

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """Blocks were given to a request; the last `external` tokens of what it has computed are to be loaded."""
        state = self._requests.get(request.request_id)
        if state is None or external <= 0:
            return
        stop = self._reach(state)
        first = stop - external
        spans = tuple(span for span in state.spans if span.stop > first and span.start < stop)
        following: tuple[int, ...] = ()
        if self._repairs and any(span.moves for span in spans):
            spans = tuple(span for span in state.spans if span.start < stop)
            following = tuple(state.prompt.ids[spans[-1].stop :].tolist())
        held = tuple(blocks[: stop // self.block_size])
        state.load = self._job(request.request_id, state, spans, held, first, following)

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
                known.approximate = _approximate(known.spans, new.num_computed_tokens)
                saves += self._ready(new.req_id, known, new.num_computed_tokens + scheduled.get(new.req_id, 0))
        again = output.scheduled_cached_reqs
        for place, name in enumerate(again.req_ids):
            known = self._requests.get(name)
            if known is None:
                continue
            more = again.new_block_ids[place]
            if name in again.resumed_req_ids:
                known.blocks = []
                known.approximate = _approximate(known.spans, again.num_computed_tokens[place])
            known.blocks += more[0] if more is not None else ()
            saves += self._ready(name, known, again.num_computed_tokens[place] + scheduled.get(name, 0))
        return Work(tuple(loads), tuple(saves))

    def _ready(self, name: str, state: RequestState, computed: int) -> list[Job]:
        """The spans that are whole after this step and that the store is not known to have."""
        reach = min(computed, len(state.blocks) * self.block_size)
        whole = next((n for n, span in enumerate(state.spans) if span.stop > reach), len(state.spans))
        new, state.saved = state.spans[max(state.saved, state.found) : whole], max(state.saved, whole)
        spans = tuple(span for span in new if not span.moves)  # rows behind anything else are no entry of their own
        if not spans:
            return []
        stop = spans[-1].stop
        blocks = tuple(state.blocks[: -(-stop // self.block_size)])
        return [self._job(name, state, spans, blocks)]

    def _job(self, name: str, state: RequestState, spans: tuple[Span, ...], blocks: tuple[int, ...], *more: Any) -> Job:
        ids = state.prompt.ids[: spans[-1].stop].clone()  # what is sent to another process is sent with all its memory
        return Job(name, state.prompt.tenant, ids, spans, blocks, *more)

    # Afterwards.

    def failed(self, blocks: Iterable[int]) -> list[Job]:
        """Blocks that a load could not fill: their requests are computed from there on, and not loaded again."""
        lost, jobs = set(blocks), []
        for state in self._requests.values():
            job = state.loading
            if job is None or not lost.intersection(job.blocks):
                continue
            first = next(place for place, block in enumerate(job.blocks) if block in lost)
            state.found = sum(span.stop <= first * self.block_size for span in state.spans)
            state.approximate = _approximate(state.spans, first * self.block_size)
            state.barred, state.loading = True, None
            jobs.append(job)
        return jobs

    def finished(self, request_id: str) -> int:
        """The request is over, answered or cancelled; tokens of it that come from documents read elsewhere."""
        state = self._requests.pop(request_id, None)
        return 0 if state is None else state.approximate

    def __len__(self) -> int:
        return len(self._requests)


def _approximate(spans: Iterable[Span], computed: int) -> int:
    """How many of the first `computed` tokens lie in spans that are read elsewhere."""
    return sum(max(0, min(span.stop, computed) - span.start) for span in spans if span.moves)
