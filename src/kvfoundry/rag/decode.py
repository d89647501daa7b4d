"""The third step of the pipeline: an answer over the passages that fit, while others are brought before they matter.

One answer is a sequence of calls: pieces of the question, then one token each. After every call the policy says what
each passage is worth by what was read, and the scheduler begins transfers; before every call what has arrived takes its
place. A call never waits for a transfer unless it is told to. What has been read is not read again: a passage that
comes later is seen by what follows, as if it had been there for those tokens from the beginning.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from kvfoundry.attention import family_of
from kvfoundry.blend.check import require_exact
from kvfoundry.blend.ropes import ropes_of
from kvfoundry.cache import KVCache
from kvfoundry.checks import number, whole
from kvfoundry.devices import is_spread
from kvfoundry.errors import SpecError, UnsupportedModelError
from kvfoundry.evaluate.prompts import line_stops
from kvfoundry.rag.build import token_bytes
from kvfoundry.rag.making import Maker
from kvfoundry.rag.observing import Read
from kvfoundry.rag.policies import Policy, Seen, policy
from kvfoundry.rag.policies.base import MEASURES
from kvfoundry.rag.prompts import Laid, score
from kvfoundry.rag.reader import PromptChunks, Reader, best_token
from kvfoundry.rag.residents import Placed
from kvfoundry.rag.room import Room, first_residents
from kvfoundry.rag.scheduler import Limits, Scheduler
from kvfoundry.rag.trace import Answer, Step
from kvfoundry.rag.transfers import Arrived, Transfers


@dataclass(frozen=True)
class Settings:
    """How answers are decoded.

    room: for rows of passages. ahead, horizon, margin: see `Limits`. wait: a call waits for what was predicted
    `horizon` calls before it. delay: seconds that a transfer takes at least. piece: tokens of the question that are
    read in one call. measure: read question and answer once more over all passages, to know what absent ones would
    have got.
    """

    policy: Policy = field(default_factory=lambda: policy("summary"))
    room: Room = field(default_factory=lambda: Room(share=1.0))
    ahead: int = 1
    horizon: int = 4
    margin: float = 0.1
    wait: bool = False
    delay: float = 0.0
    piece: int = 8
    new_tokens: int = 16
    measure: bool = False

    def __post_init__(self) -> None:
        number("transfer delay", self.delay, least=0.0, most=60.0)
        whole("piece", self.piece, least=1)
        whole("new tokens", self.new_tokens, least=1)
        Limits(0, self.ahead, self.horizon, self.margin)


@dataclass(frozen=True)
class Foreseen:
    """An answer over all passages: its tokens, and the attention [candidates] of every position from `start` on."""

    tokens: list[int]
    start: int
    mass: torch.Tensor

    def after(self, position: int, steps: int) -> list[float]:
        """Mean attention of the `steps` positions behind one; that of the last where the answer has ended."""
        first = min(position + 1 - self.start, len(self.mass) - 1)
        found: list[float] = self.mass[first : first + max(1, steps)].mean(dim=0).tolist()
        return found


class Decoder:
    """Answers prompts of one model. maker: gives chunks; its store is the caller's to close."""

    def __init__(self, maker: Maker, settings: Settings):
        if is_spread(maker.model):
            raise UnsupportedModelError(
                f"{family_of(maker.model)}: the model is split over devices, and passages that come and go while an "
                "answer is decoded are kept on one; load it on one device, or blend the passages (kvfoundry.generate)."
            )
        self.maker, self.settings = maker, settings
        self.shape = require_exact(maker.model)
        self.stops = frozenset(line_stops(maker.model, maker.tokenizer)["eos_token_id"])

    def answer(self, prompt: Laid) -> Answer:
        """The answer of one prompt with everything that happened.

        Whatever is raised, the transfer thread has ended and nothing stays pinned.
        """
        chunks = PromptChunks(self.maker, prompt)
        with self.maker.store.pin(chunks.head_key, *chunks.keys):
            foreseen = self.everything(chunks) if self.settings.policy.foresees else None
            answer = _Decoding(self, chunks, foreseen).run()
            if self.settings.measure:
                self._measure(chunks, answer)
        return answer

    def everything(self, chunks: PromptChunks) -> Foreseen:
        """The answer with all passages resident from the beginning."""
        prompt = chunks.prompt
        reader = Reader(chunks, {each: chunks.placed(each) for each in range(len(prompt.candidates))})
        logits = reader.read(prompt.question)[-1]
        mass = [reader.look().mass]
        tokens: list[int] = []
        for _ in range(self.settings.new_tokens):
            tokens.append(best_token(logits, self.stops, first=not tokens))
            if tokens[-1] in self.stops or len(tokens) == self.settings.new_tokens:
                break
            logits = reader.read(tokens[-1:])[-1]
            mass.append(reader.look().mass)
        return Foreseen(tokens, prompt.question_at, torch.cat(mass))

    def _measure(self, chunks: PromptChunks, answer: Answer) -> None:
        """Say of every step how much attention its tokens would have had for each passage."""
        prompt = chunks.prompt
        reader = Reader(chunks, {each: chunks.placed(each) for each in range(len(prompt.candidates))})
        reader.read([*prompt.question, *answer.token_ids[:-1]])
        mass = reader.look().mass
        for step in answer.steps:
            first = step.position - prompt.question_at
            step.measured(mass[first : first + step.tokens].mean(dim=0).tolist())


class _Decoding:
    """One answer on its way."""

    def __init__(self, decoder: Decoder, chunks: PromptChunks, foreseen: Foreseen | None):
        self.decoder, self.settings, self.chunks, self.foreseen = decoder, decoder.settings, chunks, foreseen
        self.prompt = chunks.prompt
        sizes = [token_bytes(decoder.shape) * len(each.token_ids) for each in self.prompt.candidates]
        own = self.settings
        room = own.room.of(sizes)
        self.scheduler = Scheduler(
            sizes,
            Limits(room, own.ahead, own.horizon, own.margin),
            first_residents(sizes, self.prompt.ranks, self.prompt.found, room),
        )
        self.seen = Seen(self.prompt.ranks, frozenset(self.scheduler.resident))
        self.steps: list[Step] = []
        self.values = [0.0] * len(sizes)

    def run(self) -> Answer:
        began = time.perf_counter()
        shelf = self.chunks.shelf() if self.settings.policy.estimates else None
        # The reader copies these rows into its cache; nobody else keeps them.
        self.reader = Reader(
            self.chunks, {each: self.chunks.placed(each) for each in sorted(self.scheduler.resident)}, shelf=shelf
        )
        loaded = time.perf_counter() - began
        with Transfers(self.chunks.placed, self.settings.delay) as self.transfers:
            tokens = self._tokens(began)
        text = str(self.decoder.maker.tokenizer.decode(tokens, skip_special_tokens=True))
        return Answer(
            item=self.prompt.item,
            text=text,
            token_ids=tokens,
            f1=score(self.prompt, text),
            candidates=[each.id for each in self.prompt.candidates],
            room=self.scheduler.limits.room,
            load_seconds=loaded,
            first_token_seconds=self.first_token,
            seconds=time.perf_counter() - began,
            peak_bytes=max((step.resident_bytes for step in self.steps), default=0),
            steps=self.steps,
        )

    def _tokens(self, began: float) -> list[int]:
        question, piece = self.prompt.question, self.settings.piece
        # The newest tokens decide most; a short piece comes first, so that the last one is whole.
        cuts = list(range(len(question), 0, -piece))[::-1]
        starts = [0, *cuts[:-1]]
        for start, stop in zip(starts, cuts, strict=True):
            logits = self._call(question[start:stop], "question")
        tokens: list[int] = []
        for _ in range(self.settings.new_tokens):
            tokens.append(best_token(logits[-1], self.decoder.stops, first=not tokens))
            if len(tokens) == 1:
                self.first_token = time.perf_counter() - began
            if tokens[-1] in self.decoder.stops or len(tokens) == self.settings.new_tokens:
                break
            logits = self._call(tokens[-1:], "answer")
        return tokens

    def _call(self, ids: Sequence[int], kind: str) -> torch.Tensor:
        step = Step(len(self.steps), kind, self.reader.seen, len(ids), list(ids) if kind == "answer" else [])
        self.steps.append(step)
        if self.settings.wait:
            step.stall_seconds = self.transfers.wait(self.scheduler.due(step.number - 1))
        self._land(step)
        step.resident = sorted(self.scheduler.resident)
        step.resident_bytes = self.reader.residents.nbytes
        began = time.perf_counter()
        logits = self.reader.read(ids)
        look = self.reader.look()
        step.seconds = time.perf_counter() - began
        step.spent = look.mass.mean(dim=0).tolist()
        self.seen.resident = frozenset(self.scheduler.resident)
        self.seen.note(_by_measure(look.spent), None if look.estimated is None else _by_measure(look.estimated))
        if self.foreseen is not None:
            self.seen.future = self.foreseen.after(step.position + step.tokens - 1, self.settings.horizon)
        self.values = self.settings.policy.values(self.seen)
        step.values = [round(value, 6) for value in self.values]
        for each in self.scheduler.predict(self.values, step.number):
            step.started.append(each)
            self.transfers.start(each)
        return logits

    def _land(self, step: Step) -> None:
        """Give what has arrived its place."""
        for arrived in self.transfers.landed():
            self._arrive(step, arrived)

    def _arrive(self, step: Step, arrived: Arrived[Placed]) -> None:
        if arrived.content is None:
            self.scheduler.fail(arrived.number)
            step.failed.append({"candidate": arrived.number, "why": arrived.failure})
            return
        leaving = self.scheduler.arrive(arrived.number, self.values)
        if leaving is None:
            step.dropped.append(arrived.number)
            return
        self.reader.residents.exchange(leaving, {arrived.number: arrived.content})
        step.landed.append({"candidate": arrived.number, "replaced": leaving, "seconds": round(arrived.seconds, 4)})
        step.evicted += leaving


def _by_measure(read: Read) -> dict[str, list[float]]:
    return {by: getattr(read, by).tolist() for by in MEASURES}


def check_placeholders(model: PreTrainedModel, placeholders: str) -> None:
    """Refuse passages that are kept as text where they cannot be computed beside an answer.

    Raises:
        SpecError: the model's frequencies change with the length of what it reads.
    """
    if placeholders == "text" and any(rope.depends_on_length for rope in ropes_of(model, KVCache(model))):
        raise SpecError(
            "this model's rotary frequencies change with the length of a text, so passages cannot be computed while an "
            "answer is; build with --placeholders kv."
        )
