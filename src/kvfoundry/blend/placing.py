"""Chunks put in their places in a prompt, layer by layer, while other layers are computed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfoundry.blend.rows import WorkingRows
from kvfoundry.chunks import ChunkKV
from kvfoundry.errors import CacheStateError
from kvfoundry.rope import Rope


@dataclass(frozen=True, eq=False)
class Piece:
    """A chunk and the position of its first token in the prompt."""

    chunk: ChunkKV
    at: int

    @property
    def tokens(self) -> int:
        return len(self.chunk.token_ids)

    @property
    def stop(self) -> int:
        return self.at + self.tokens

    def is_complete(self, layer: int) -> bool:
        """Whether every head of a layer has a row of every token, in order."""
        held = self.chunk.layers[layer]
        return held.is_whole and bool((held.lengths == self.tokens).all())


def placed(chunks: Sequence[ChunkKV]) -> list[Piece]:
    """The chunks one behind the other, from position 0 on."""
    pieces, at = [], 0
    for chunk in chunks:
        pieces.append(Piece(chunk, at))
        at += len(chunk.token_ids)
    return pieces


def sources(pieces: Sequence[Piece]) -> Tensor:
    """The position at which the key of every token of a prompt is rotated before it moves: [tokens], on the CPU."""
    return torch.cat([torch.arange(piece.tokens) + piece.chunk.start for piece in pieces])


@torch.inference_mode()
def placed_layer(piece: Piece, layer: int, rope: Rope, device: torch.device, to_length: int) -> tuple[Tensor, Tensor]:
    """Keys, turned to their places in the prompt, and values of one layer: [heads, tokens, dim] on the device.

    to_length: tokens of the whole prompt. CacheStateError for a chunk that lacks rows of some tokens, or holds codes.
    """
    if not piece.is_complete(layer):
        raise CacheStateError("the chunk does not hold a plain row of every token in every head.")
    rows = piece.chunk.layers[layer].record.tensors
    keys, values = (rows[name].to(device, non_blocking=True) for name in ("keys", "values"))
    there = torch.arange(piece.tokens, device=device)[None, None] + piece.chunk.start
    here = there - piece.chunk.start + piece.at
    if piece.chunk.start != piece.at or rope.depends_on_length:
        length = piece.chunk.start + piece.tokens
        keys = rope.move(keys[None], there, here, length=length, to_length=max(to_length, piece.stop))[0]
    return keys, values


class Feed:
    """Working rows of every layer of a batch of prompts, made ahead by one thread in the order in which they are read.

    pieces: the chunks of every batch row in their places; ropes, devices: of every attention layer. On a CUDA device
    the thread copies and turns on a stream of its own. Use as a context manager: leaving it ends the thread.
    """

    def __init__(self, pieces: list[list[Piece]], ropes: list[Rope], devices: list[torch.device], to_length: int):
        self.pieces, self.ropes, self.devices, self.to_length = pieces, ropes, devices, to_length
        self.lengths = torch.tensor([own[-1].stop for own in pieces])
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvfoundry-blend")
        self._streams = {each: torch.cuda.Stream(each) for each in set(devices) if each.type == "cuda"}
        for device, stream in self._streams.items():  # chunks may have been computed a moment ago
            stream.wait_stream(torch.cuda.current_stream(device))
        self._coming: dict[int, Future[tuple[WorkingRows, torch.cuda.Event | None]]] = {}
        self._known_tables: dict[tuple[Any, ...], tuple[Tensor, Tensor] | None] = {}

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)
        for device, stream in self._streams.items():  # what it has read may be freed from here on
            torch.cuda.current_stream(device).wait_stream(stream)

    def start(self, layers: Sequence[int]) -> None:
        """Begin to make the rows of these layers, in this order."""
        for layer in layers:
            if layer not in self._coming:
                self._coming[layer] = self._worker.submit(self._make, layer)

    def rows(self, layer: int) -> WorkingRows:
        """The rows of a layer, waited for if need be."""
        self.start([layer])
        made, event = self._coming.pop(layer).result()
        if event is not None:
            current = torch.cuda.current_stream(self.devices[layer])
            current.wait_event(event)
            for tensor in (made.keys, made.values, made.positions):
                tensor.record_stream(current)  # made on another stream: not to be freed while this one reads
        return made

    def absent(self, layer: int) -> bool:
        """Whether some token has no row in some head of this layer."""
        return not all(piece.is_complete(layer) for own in self.pieces for piece in own)

    @torch.inference_mode()
    def _make(self, layer: int) -> tuple[WorkingRows, torch.cuda.Event | None]:
        stream = self._streams.get(self.devices[layer])
        if stream is None:
            return self._assembled(layer), None
        with torch.cuda.stream(stream):
            made = self._assembled(layer)
            return made, stream.record_event()

    def positions(self, layer: int) -> Tensor:
        """Where a row of this layer is: [batch, heads or 1, tokens], -1 elsewhere."""
        width, device = int(self.lengths.max()), self.devices[layer]
        if not self.absent(layer):
            tokens = torch.arange(width, device=device)
            return torch.where(tokens < self.lengths.to(device)[:, None], tokens, -1)[:, None]
        positions = torch.full((len(self.pieces), self.heads(layer), width), -1, device=device)
        for row, own in enumerate(self.pieces):
            for piece in own:
                held = piece.chunk.layers[layer].rows()
                groups = positions.shape[1] // held.keys.shape[1]
                local = held.head_positions[0].to(device, torch.long).repeat_interleave(groups, dim=0)
                head, slot = (local >= 0).nonzero(as_tuple=True)
                token = local[head, slot] + piece.at
                positions[row, head, token] = token
        return positions

    def heads(self, layer: int) -> int:
        """Heads that rows are kept for: KV heads, or query heads where a chunk was compressed for each of those."""
        return max(len(piece.chunk.layers[layer].lengths) for own in self.pieces for piece in own)

    def _assembled(self, layer: int) -> WorkingRows:
        first = self.pieces[0][0].chunk.layers[layer].rows()
        positions, whole = self.positions(layer), not self.absent(layer)
        batch, heads, width = len(self.pieces), self.heads(layer), int(self.lengths.max())
        # Where every slot is filled, nothing has to be cleared.
        filled = whole and bool((self.lengths == width).all())
        make = first.keys.new_empty if filled else first.keys.new_zeros
        keys = make((batch, heads, width, first.keys.shape[3]), device=self.devices[layer])
        values = make((batch, heads, width, first.values.shape[3]), device=self.devices[layer])
        for row, own in enumerate(self.pieces):
            for piece in own:
                self._copy(piece, layer, keys[row], values[row])
            self._move(row, layer, keys[row])
        return WorkingRows(keys, values, positions, self.lengths, whole=whole)

    def _copy(self, piece: Piece, layer: int, keys: Tensor, values: Tensor) -> None:
        """The rows of a piece into [heads, tokens, dim] of its prompt, each in the slot of its token."""
        if piece.is_complete(layer):
            rows = piece.chunk.layers[layer].record.tensors
            for target, name in ((keys, "keys"), (values, "values")):
                source = rows[name].to(target.device, non_blocking=True)
                groups = target.shape[0] // source.shape[0]
                source = source if groups == 1 else source.repeat_interleave(groups, dim=0)
                target[:, piece.at : piece.stop] = source
            return
        held = piece.chunk.layers[layer].rows()
        groups = keys.shape[0] // held.keys.shape[1]
        for target, source in ((keys, held.keys[0]), (values, held.values[0])):
            source = source.to(target.device, non_blocking=True).repeat_interleave(groups, dim=0)
            local = held.head_positions[0].to(target.device, torch.long).repeat_interleave(groups, dim=0)
            head, slot = (local >= 0).nonzero(as_tuple=True)
            target[head, local[head, slot] + piece.at] = source[head, slot]

    def _move(self, row: int, layer: int, keys: Tensor) -> None:
        """Turn the keys [heads, tokens, head_dim] of a prompt to the positions of their slots, in place."""
        rope, pieces = self.ropes[layer], self.pieces[row]
        spans = [(piece.at, piece.stop, piece.chunk.start + piece.tokens) for piece in pieces]
        if not rope.depends_on_length:  # then all chunks turn by the same tables
            spans = [(0, spans[-1][1], 0)]
        for start, stop, length in spans:
            part = keys[None, :, start:stop]
            tables = self._tables(rope, row, start, stop, length, part)
            if tables is not None:
                rope.turned(part, tables, out=part)

    def _tables(
        self, rope: Rope, row: int, start: int, stop: int, length: int, keys: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """What turns the tokens of a span; None where nothing does. The same for all layers of one embedding."""
        key = (row, start, stop, keys.device, keys.dtype, rope.layer_type, rope.layout)
        if key not in self._known_tables:
            here, there = torch.arange(start, stop), sources(self.pieces[row])[start:stop]
            tables = None
            if rope.depends_on_length or not torch.equal(here, there):
                before, now = (positions.to(keys.device)[None, None] for positions in (there, here))
                tables = rope.tables_between(keys, before, now, length=length, to_length=self.to_length)
            self._known_tables[key] = tables
        return self._known_tables[key]
