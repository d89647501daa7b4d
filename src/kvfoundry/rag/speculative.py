"""Speculative decoding over passages: drafts over those that are resident, verified over all.

A draft is cheap, because it reads few rows; the verification reads all of them once for several tokens. What is kept
is what decoding over all passages would have said: every token of an answer comes from a call that reads everything.
The rows of question and answer stay those of the verifying calls, and drafts read them too.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

import torch

from kvfoundry.checks import whole
from kvfoundry.rag.build import token_bytes
from kvfoundry.rag.decode import Decoder, Settings
from kvfoundry.rag.making import Maker
from kvfoundry.rag.prompts import Laid, score
from kvfoundry.rag.reader import PromptChunks, Reader, best_token
from kvfoundry.rag.residents import Placed
from kvfoundry.rag.room import first_residents
from kvfoundry.rag.trace import Answer, Step


class Speculator:
    """Answers prompts of one model. drafts: tokens that are guessed before they are verified; the rest as `Decoder`.

    Absent passages are held on the host, and are on the device for the time of a verifying call.
    """

    def __init__(self, maker: Maker, settings: Settings, drafts: int = 4):
        whole("drafts", drafts, least=1)
        self.drafts, self.maker, self.settings = drafts, maker, settings
        self._decoder = Decoder(maker, settings)

    def answer(self, prompt: Laid) -> Answer:
        """The answer of one prompt: the tokens of decoding with all passages."""
        chunks = PromptChunks(self.maker, prompt)
        with self.maker.store.pin(chunks.head_key, *chunks.keys):
            return self._answer(chunks)

    def _answer(self, chunks: PromptChunks) -> Answer:
        began, prompt = time.perf_counter(), chunks.prompt
        own, stops = self.settings, self._decoder.stops
        sizes = [token_bytes(self._decoder.shape) * len(each.token_ids) for each in prompt.candidates]
        room = own.room.of(sizes)
        here = first_residents(sizes, prompt.ranks, prompt.found, room)
        reader = Reader(chunks, {each: chunks.placed(each) for each in range(len(sizes))}, observed=False)
        absent = {each: chunks.placed(each).to("cpu") for each in range(len(sizes)) if each not in here}
        loaded = time.perf_counter() - began
        log = _Log(reader, sorted(here), list(range(len(sizes))))

        logits = log.call(prompt.question, "question", full=True)
        tokens = [best_token(logits[-1], stops, first=True)]
        first_token = time.perf_counter() - began
        proposed = accepted = rounds = 0
        while tokens[-1] not in stops and len(tokens) < own.new_tokens:
            guesses = self._guess(log, tokens[-1], min(self.drafts, own.new_tokens - len(tokens) - 1), stops, absent)
            logits = log.call([tokens[-1], *guesses], "verify", full=True)
            said = [best_token(row, stops, first=False) for row in logits]
            right = next((i for i, guess in enumerate(guesses) if guess != said[i]), len(guesses))
            _take_back(reader, len(guesses) - right)
            tokens += said[: right + 1]
            proposed, accepted, rounds = proposed + len(guesses), accepted + right, rounds + 1
            ends = [i for i, token in enumerate(tokens) if token in stops]
            tokens = tokens[: ends[0] + 1] if ends else tokens
        text = str(self.maker.tokenizer.decode(tokens, skip_special_tokens=True))
        return Answer(
            item=prompt.item, text=text, token_ids=tokens, f1=score(prompt, text),
            candidates=[each.id for each in prompt.candidates], room=room, load_seconds=loaded,
            first_token_seconds=first_token, seconds=time.perf_counter() - began, peak_bytes=sum(sizes),
            steps=log.steps,
            speculation={
                "drafts": self.drafts, "rounds": rounds, "proposed": proposed, "accepted": accepted,
                "accepted_share": accepted / proposed if proposed else None,
            },
        )  # fmt: skip

    def _guess(
        self, log: _Log, token: int, most: int, stops: Collection[int], absent: Mapping[int, Placed]
    ) -> list[int]:
        """Up to `most` tokens that follow, greedy over what is resident; the cache is as before."""
        guesses: list[int] = []
        if most < 1:
            return guesses
        reader = log.reader
        reader.residents.exchange(list(absent), {})
        at = reader.seen
        while len(guesses) < most and token not in stops:
            token = best_token(log.call([token], "draft", full=False)[-1], stops, first=False)
            guesses.append(token)
        reader.residents.exchange([], absent)  # first, so that window layers have no gap when tokens are taken back
        _take_back(reader, reader.seen - at)
        return guesses


class _Log:
    """Calls of a reader, with a step for each."""

    def __init__(self, reader: Reader, resident: list[int], everything: list[int]):
        self.reader, self.steps = reader, list[Step]()
        self._resident, self._everything = resident, everything

    def call(self, ids: Collection[int], kind: str, *, full: bool) -> torch.Tensor:
        step = Step(len(self.steps), kind, self.reader.seen, len(ids), [] if kind == "question" else list(ids))
        step.resident = self._everything if full else self._resident
        step.resident_bytes = self.reader.residents.nbytes
        began = time.perf_counter()
        logits = self.reader.read(list(ids))
        step.seconds = time.perf_counter() - began
        self.steps.append(step)
        return logits


def _take_back(reader: Reader, tokens: int) -> None:
    """The cache without its newest tokens."""
    if tokens:
        for layer in reader.cache.attention_layers:
            layer.crop(-tokens)
