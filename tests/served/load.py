"""A load: many clients, few documents, and what every one of its requests must have found in the store.

What must be found is computed from the trace, span by span: a span is *sure* when an earlier request with the same
tokens up to its end was answered a while before this one was sent, *possible* when one was at least under way.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .prompts import QUESTIONS, prompt
from .servers import Answer, Server

# Tokens of an entry here, and of one of vLLM's blocks: documents are short.
SPAN = 64
# Sentences of a document, which make 200 to 300 tokens.
SENTENCES = 9
# An answer's rows are in the store so many seconds later at the latest.
_WRITTEN = 1.5
# A client that was cut off tries again for so many seconds.
_PATIENCE = 300.0


@dataclass(frozen=True)
class Asked:
    """One request. tokens: of its answer."""

    document: int
    question: int
    tokens: int

    @property
    def prompt(self) -> str:
        return prompt(QUESTIONS[self.question], seed=self.document, sentences=SENTENCES)


def trace(requests: int, documents: int, seed: int = 9) -> list[Asked]:
    """Requests in the order in which clients take them: some documents are asked about often, others seldom."""
    source = random.Random(seed)
    weights = [1 / (place + 2) for place in range(documents)]
    chosen = [*range(documents), *source.choices(range(documents), weights, k=requests - documents)]
    source.shuffle(chosen)
    return [Asked(document, source.randrange(len(QUESTIONS)), source.randint(4, 8)) for document in chosen]


@dataclass
class Sent:
    """What came of a request. tries: when each was sent and when it ended, the last one with the answer."""

    asked: Asked
    answer: Answer | None = None
    tries: list[tuple[float, float]] = field(default_factory=list)

    @property
    def broken(self) -> int:
        """Tries that a server that died cut off."""
        return len(self.tries) - 1


def run(
    asked: Sequence[Asked], server: Callable[[], Server], clients: int = 8, seen: Callable[[int], None] = lambda _: None
) -> list[Sent]:
    """Send all requests from some clients. server: the one to ask now; seen: is told how many answers there are.

    A request that fails is sent again only when the server that it was sent to is dead, and to the next one.
    """
    count, lock = 0, threading.Lock()

    def one(request: Asked) -> Sent:
        nonlocal count
        sent, end = Sent(request), time.monotonic() + _PATIENCE
        while sent.answer is None:
            at, began = server(), time.monotonic()
            try:
                sent.answer = at.ask(request.prompt, request.tokens, logprobs=None)
            except Exception:
                time.sleep(0.5)
                if at is server() and at.process.poll() is None:
                    raise
                while at is server():  # until there is another
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.1)
            sent.tries.append((began, time.monotonic()))
        with lock:
            count += 1
            now = count
        seen(now)
        return sent

    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(one, asked))


@dataclass(frozen=True)
class Verdict:
    """Of one load. found: prompt tokens that servers say were not computed; sure, possible: by the trace."""

    requests: int
    wrong_texts: int
    broken: int
    out_of_bounds: int
    found: int
    sure: int
    possible: int
    reusable: int
    prompt_tokens: int

    @property
    def shares(self) -> dict[str, float]:
        """Of the tokens in whole spans of all prompts."""
        named = {"hit_rate": self.found, "hit_rate_sure": self.sure, "hit_rate_possible": self.possible}
        return {name: round(number / self.reusable, 4) for name, number in named.items()}


def judged(
    sent: Sequence[Sent],
    wanted: dict[Asked, str],
    ids: Callable[[str], Iterable[int]],
    span: int,
    killed: float = float("inf"),
) -> Verdict:
    """Compare a load with the texts of a server without the connector, and with its own trace.

    killed: when the server died; what it had answered just before may not have been written.
    """
    tokens = {request.asked: tuple(ids(request.asked.prompt)) for request in sent}
    tried = [(began, ended, tokens[each.asked]) for each in sent for began, ended in each.tries]
    whole = [(each.tries[-1][1], tokens[each.asked]) for each in sent]
    outside = found = sure = possible = reusable = 0
    for each in sent:
        assert each.answer is not None
        own, (began, ended) = tokens[each.asked], each.tries[-1]
        assert len(own) == each.answer.prompt_tokens, "the tokenizer is another one than the server's"
        usable = (len(own) - 1) // span
        before = [other for end, other in whole if end + _WRITTEN <= began and not end <= killed < end + _WRITTEN]
        beside = [other for start, _, other in tried if start < ended and (start, other) != (began, own)]
        low, high = (_spans(own, others, span, usable) * span for others in (before, [*before, *beside]))
        outside += not low <= each.answer.cached <= high
        found, sure, possible = found + each.answer.cached, sure + low, possible + high
        reusable += usable * span
    return Verdict(
        requests=len(sent),
        wrong_texts=sum(each.answer.text != wanted[each.asked] for each in sent if each.answer),
        broken=sum(each.broken for each in sent),
        out_of_bounds=outside,
        found=found,
        sure=sure,
        possible=possible,
        reusable=reusable,
        prompt_tokens=sum(map(len, (tokens[each.asked] for each in sent))),
    )


def _spans(own: tuple[int, ...], others: Iterable[tuple[int, ...]], span: int, usable: int) -> int:
    """How many of the first spans some other prompt begins with too."""
    most = 0
    for other in others:
        while (
            most < usable and len(other) >= (most + 1) * span and other[: (most + 1) * span] == own[: (most + 1) * span]
        ):
            most += 1
    return most


def measured_load(
    start: Callable[..., Server], folder: Path, tokenizer: Any, requests: int, documents: int, clients: int = 8
) -> dict[str, dict[str, Any]]:
    """The same load three times: without the connector, with it, and with it and a server that is killed half way.

    start: (name, settings, further arguments) -> a server; folder: where disk tiers are made.
    """
    asked = trace(requests, documents)
    more = ("--max-num-seqs", str(clients), "--block-size", str(SPAN))
    plain = start("load-plain", None, "--enable-prefix-caching", *more)
    wanted = {each: plain.ask(each.prompt, each.tokens, logprobs=None).text for each in dict.fromkeys(asked)}
    plain.stop()
    told = {}
    for name, kill_at in (("undisturbed", 0), ("killed once", requests // 2)):
        settings = {"store": f"host:1GiB,disk:{folder / name.replace(' ', '-')}:4GiB", "span": SPAN}
        serving = _Serving(lambda name=name, settings=settings: start(f"load-{name}", settings, *more), kill_at)
        began = time.monotonic()
        sent = run(asked, lambda serving=serving: serving.server, clients, serving.seen)
        seconds = time.monotonic() - began
        verdict = judged(sent, wanted, lambda text: tokenizer(text)["input_ids"], SPAN, serving.killed)
        told[name] = {**asdict(verdict), **verdict.shares, "seconds": round(seconds, 1)}
        serving.server.stop()
    return told


class _Serving:
    """A server, and the one after it when it is killed at its `kill_at`th answer."""

    def __init__(self, begin: Callable[[], Server], kill_at: int):
        self._begin, self._kill_at = begin, kill_at
        self.server, self.killed = begin(), float("inf")

    def seen(self, answers: int) -> None:
        if answers == self._kill_at:
            self.killed = time.monotonic()
            self.server.stop(signal.SIGKILL)
            self.server = self._begin()
