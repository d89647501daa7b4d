"""A prompt being blended: passes of the unchanged model over some of its tokens, on top of rows that are reused."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvfoundry import compat
from kvfoundry.blend.layer import BlendLayer, Listener, Pass, Reached
from kvfoundry.blend.placing import Feed, Piece
from kvfoundry.blend.rows import WorkingRows
from kvfoundry.cache import KVCache
from kvfoundry.devices import input_device
from kvfoundry.method import Method


@dataclass(frozen=True, eq=False)
class Context:
    """What a batch of prompts is made of.

    pieces: the chunks of every batch row in their places, from position 0 on without a gap. questions: token ids of
    what follows in every batch row, empty where that is not known yet.
    """

    pieces: list[list[Piece]]
    questions: list[Tensor]

    @cached_property
    def ids(self) -> list[Tensor]:
        """Token ids of every batch row."""
        return [torch.cat([piece.chunk.token_ids for piece in own]) for own in self.pieces]

    @cached_property
    def lengths(self) -> Tensor:
        """[batch] tokens, on the CPU."""
        return torch.tensor([own[-1].stop for own in self.pieces])

    @cached_property
    def whole_length(self) -> int:
        """Tokens of the longest prompt, its question included."""
        return max(len(ids) + len(question) for ids, question in zip(self.ids, self.questions, strict=True))

    @cached_property
    def exact(self) -> list[int]:
        """How many of the first tokens of every batch row have the very rows that a full prefill would give them."""
        return [_exact(own, ids) for own, ids in zip(self.pieces, self.ids, strict=True)]


def _exact(pieces: list[Piece], ids: Tensor) -> int:
    stop = 0
    for piece in pieces:
        chunk = piece.chunk
        in_place = chunk.start == piece.at and torch.equal(chunk.context_ids, ids[: piece.at])
        if not in_place or Method.parse(chunk.method).lossy:
            break
        if not all(piece.is_complete(layer) for layer in range(len(chunk.layers))):
            break
        stop = piece.stop
    return stop


class _PassCache(Cache):
    """What the model takes for its cache in a pass: layers that are always at the beginning of the text."""


@dataclass(eq=False)
class Blending:
    """Passes over one batch of prompts. cache: empty, takes over the rows in the end; feed: makes the reused rows.

    device: where the model takes tokens; a layer of a split model may compute, and has its rows, elsewhere.
    """

    model: PreTrainedModel
    context: Context
    cache: KVCache
    feed: Feed
    device: torch.device = field(init=False)
    layers: list[BlendLayer] = field(init=False)

    def __post_init__(self) -> None:
        self.device = input_device(self.model)
        targets = self.cache.attention_layers
        self.layers = [BlendLayer(number, target, self.feed) for number, target in enumerate(targets)]
        stand_ins = iter(self.layers)
        held = set(map(id, targets))
        layers = [next(stand_ins) if id(layer) in held else layer for layer in self.cache.layers]
        self._passes = _PassCache(layers=layers)
        self._depends_on_length = any(rope.depends_on_length for rope in self.feed.ropes)

    @property
    def lengths(self) -> Tensor:
        return self.context.lengths

    @property
    def exact(self) -> list[int]:
        """`Context.exact`, and nothing where other lengths mean other frequencies, so that every row may differ."""
        return [0] * len(self.lengths) if self._depends_on_length else self.context.exact

    @cached_property
    def everything(self) -> list[Tensor]:
        """All token indices of every batch row."""
        return [torch.arange(int(length)) for length in self.lengths]

    def rows(self, layer: int) -> WorkingRows:
        """The rows of an attention layer as they are now."""
        return self.layers[layer].working

    def probe(self, tokens: list[Tensor], layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some tokens in a layer, from a pass that ends there: [batch, heads, tokens, dim].

        What the pass computes in the layers before replaces the reused rows there.
        """
        step = self._step(tokens, stop_at=layer)
        self._run(step, self.context.ids)
        assert step.caught is not None
        return step.caught

    def write(self, layer: int, tokens: list[Tensor], keys: Tensor, values: Tensor) -> None:
        """Put fresh rows of some tokens in the place of the reused ones of a layer; as `WorkingRows.write`."""
        rows = self.rows(layer)
        rows.write([own.to(rows.keys.device) for own in tokens], keys, values)
        rows.seal()

    def ask(self, listener: Listener) -> None:
        """Let the questions read the reused rows, and the listener look on; nothing of it stays."""
        lengths = [int(length) for length in self.lengths]
        tokens = [torch.arange(at, at + len(own)) for at, own in zip(lengths, self.context.questions, strict=True)]
        whole = [torch.cat(both) for both in zip(self.context.ids, self.context.questions, strict=True)]
        self.feed.start(range(len(self.layers)))
        self._run(Pass(tokens, behind=True, listener=listener), whole)

    def finish(self, tokens: list[Tensor], *, corner_from: int | None = None, logits: bool = False) -> Tensor | None:
        """Compute these tokens in all layers and hand all rows to the cache.

        logits: return those of the tokens, [batch, tokens, vocabulary]; None without.
        """
        if not any(len(own) for own in tokens):
            self.feed.start(range(len(self.layers)))
            for layer in self.layers:
                layer.hand_over()
            return None
        step = self._step(tokens, corner_from=corner_from, final=True)
        if not step.whole:
            self.feed.start([layer.number for layer in self.layers if layer.is_reused])
        output = self._run(step, self.context.ids, logits=logits)
        return output.logits[:, : step.columns] if logits else None

    def _step(self, tokens: list[Tensor], **how: Any) -> Pass:
        whole = all(len(own) == int(length) for own, length in zip(tokens, self.lengths, strict=True))
        return Pass(tokens, whole=whole, **how)

    def _run(self, step: Pass, texts: list[Tensor], *, logits: bool = False) -> Any:
        ids = torch.zeros(len(texts), step.columns, dtype=torch.long)
        for row, (text, tokens) in enumerate(zip(texts, step.tokens, strict=True)):
            ids[row, : len(tokens)] = text[tokens]
        ids, positions = ids.to(self.device), step.positions(self.device).clamp(min=0)
        if self._depends_on_length:
            # One more column at the end of the whole text: the model takes its frequencies from the last position.
            last = positions.new_full((len(texts), 1), self.context.whole_length - 1)
            ids, positions = torch.cat([ids, ids[:, :1]], dim=1), torch.cat([positions, last], dim=1)
        for layer in self.layers:
            layer.running = step
        try:
            return self.model(
                ids,
                attention_mask=torch.ones_like(ids),
                position_ids=positions,
                use_cache=True,
                logits_to_keep=0 if logits else 1,
                **{compat.CACHE_ARGUMENT: self._passes},
            )
        except Reached:
            return None
        finally:
            for layer in self.layers:
                layer.running = None
