"""A model that reads one prompt over the passages that are resident: the model runner, which decides nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from kvfoundry import compat
from kvfoundry.blend.ropes import ropes_of
from kvfoundry.cache import KVCache
from kvfoundry.chunks import ChunkKV
from kvfoundry.rag.making import Maker
from kvfoundry.rag.observing import Look, Observer
from kvfoundry.rag.prompts import Laid
from kvfoundry.rag.residents import Placed, Residents
from kvfoundry.rag.summaries import KeySummary, Shelf


class PromptChunks:
    """The chunks of one prompt, each at its place when it is asked for; safe to use from the transfer thread."""

    def __init__(self, maker: Maker, prompt: Laid):
        self.maker, self.prompt, self.model = maker, prompt, maker.model
        identity = maker.identity
        self.head_key = prompt.head_key(identity)
        self.keys = [each.key(identity) for each in prompt.candidates]
        self.ropes = ropes_of(self.model, KVCache(self.model))

    def chunk(self, number: int) -> ChunkKV:
        """From the store, or else computed from the text; nothing is stored then."""
        each = self.prompt.candidates[number]
        return self.maker.stored(self.keys[number]) or self.maker.read(each.token_ids, each.behind)

    @torch.inference_mode()
    def placed(self, number: int) -> Placed:
        """A candidate's rows at its place. On a GPU they are copied and turned on a stream of their own."""
        device = self.model.device
        if device.type != "cuda":
            return self._placed(self.chunk(number), self.prompt.candidates[number].at)
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            rows = self._placed(self.chunk(number), self.prompt.candidates[number].at)
            return Placed(rows.at, rows.tokens, rows.layers, stream.record_event())

    def head(self) -> Placed:
        """The rows of what opens the prompt."""
        return self._placed(self.maker.get(self.head_key), 0)

    def _placed(self, chunk: ChunkKV, at: int) -> Placed:
        return Placed.of(chunk, at, self.model, self.ropes, self.prompt.tokens)

    @torch.inference_mode()
    def shelf(self) -> Shelf:
        """The summaries of all candidates at their places."""
        found: list[KeySummary] = []
        for number, (each, key) in enumerate(zip(self.prompt.candidates, self.keys, strict=True)):
            own = self.maker.summary(key, lambda number=number: self.chunk(number))  # type: ignore[misc]
            start = len(each.behind)
            length, whole = start + len(each.token_ids), max(self.prompt.tokens, each.stop)
            if start != each.at or any(rope.depends_on_length for rope in self.ropes):
                own = own.moved(self.ropes, each.at - start, length, whole)
            found.append(own)
        return Shelf(found, self.model.device)


class Reader:
    """Reads question and answer behind what is resident. residents: may be changed between two calls."""

    def __init__(
        self, chunks: PromptChunks, first: Mapping[int, Placed], *, shelf: Shelf | None = None, observed: bool = True
    ):
        prompt, self.model = chunks.prompt, chunks.model
        self.cache = KVCache(self.model)
        front = [chunks.head()] if prompt.head else []
        self.residents = Residents(self.cache, prompt.spans, front, first, prompt.question_at)
        self.observer = Observer(self.cache, prompt.spans, shelf) if observed else None

    @property
    def seen(self) -> int:
        """The position of what is read next."""
        return self.cache.seen_tokens

    @torch.inference_mode()
    def read(self, ids: Sequence[int]) -> Tensor:
        """Logits [tokens, vocabulary] of tokens that come next."""
        if self.observer is not None:
            self.observer.forget()
        device, past = self.model.device, self.seen
        tokens = torch.tensor([list(ids)], device=device)
        places = torch.arange(past, past + len(ids), device=device)[None]
        mask = torch.ones(1, past + len(ids), dtype=torch.long, device=device)
        output = self.model(
            tokens, attention_mask=mask, position_ids=places, use_cache=True, **{compat.CACHE_ARGUMENT: self.cache}
        )
        logits: Tensor = output.logits[0]
        return logits

    def look(self) -> Look:
        """What the last call has read; to be taken once."""
        assert self.observer is not None
        return self.observer.take()


def best_token(logits: Tensor, stops: Collection[int], *, first: bool) -> int:
    """The greedy token of logits [vocabulary]; an answer does not end before it has begun."""
    if first:
        ends = torch.tensor(sorted(stops), device=logits.device, dtype=torch.long)
        logits = logits.index_fill(0, ends, -torch.inf)
    return int(logits.argmax())
