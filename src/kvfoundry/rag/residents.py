"""Which passages a cache holds while it decodes: rows come in at their kept places, and go.

Every passage has a place from the beginning, so rows that come or go move no others and change no position. Rows stay
in the order of their positions in every layer, as everywhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfoundry.blend.placing import Piece, placed_layer
from kvfoundry.cache import KVCache
from kvfoundry.chunks import ChunkKV
from kvfoundry.errors import CacheStateError
from kvfoundry.layer import CacheLayer
from kvfoundry.layouts.base import position_dtype
from kvfoundry.layouts.dense import DenseRows, spare_slots
from kvfoundry.rope import Rope


@dataclass(frozen=True, eq=False)
class Placed:
    """Rows of a passage at their place: keys and values [heads, tokens, dim] of every attention layer.

    ready: the CUDA event after which they may be read on another stream; None on a CPU.
    """

    at: int
    tokens: int
    layers: tuple[tuple[Tensor, Tensor], ...]
    ready: Any = None

    @property
    def stop(self) -> int:
        return self.at + self.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return sum(tensor.numel() * tensor.element_size() for own in self.layers for tensor in own)

    def to(self, device: str | torch.device) -> Placed:
        """The rows on another device; complete when this returns."""
        _await(self)
        layers = tuple((keys.to(device), values.to(device)) for keys, values in self.layers)
        return Placed(self.at, self.tokens, layers)

    @classmethod
    def of(cls, chunk: ChunkKV, at: int, model: PreTrainedModel, ropes: Sequence[Rope], to_length: int) -> Placed:
        """A chunk at its place, on the model's device. to_length: tokens of the whole prompt."""
        piece = Piece(chunk.plain(model), at)
        layers = tuple(placed_layer(piece, layer, rope, model.device, to_length) for layer, rope in enumerate(ropes))
        return cls(at, piece.tokens, layers)


class Residents:
    """The passages that a cache holds in front of the question, and no others of the candidates.

    Rows that come may be on the host; they are copied to where their layer is.

    spans: places of all candidates, ascending; front: what is always there; first: candidates that are there at the
    beginning; question_at: where the question begins.
    """

    def __init__(
        self,
        cache: KVCache,
        spans: Sequence[tuple[int, int]],
        front: Sequence[Placed],
        first: Mapping[int, Placed],
        question_at: int,
    ):
        self.cache, self.spans = cache, list(spans)
        self.sizes: dict[int, int] = {number: placed.nbytes for number, placed in first.items()}
        ordered = sorted([*front, *first.values()], key=lambda placed: placed.at)
        if not ordered:
            raise CacheStateError("a cache without any row cannot begin; give a head, or room for a passage.")
        for number, layer in enumerate(cache.attention_layers):
            device = ordered[0].layers[number][0].device
            rows = _rows([(placed.layers[number], _places(placed)) for placed in ordered], question_at, device)
            layer.hold(rows, question_at, rows.lengths.shape[1])
        cache.prompt.start = question_at

    @property
    def here(self) -> frozenset[int]:
        """Numbers of the candidates whose rows are in the cache."""
        return frozenset(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of their rows."""
        return sum(self.sizes.values())

    @torch.inference_mode()
    def exchange(self, leaving: Collection[int], arriving: Mapping[int, Placed]) -> None:
        """Let some candidates go and others come, in one copy of each layer; all that stays, stays as it is."""
        if not leaving and not arriving:
            return
        if absent := set(leaving) - self.here:
            raise CacheStateError(f"candidates {sorted(absent)} cannot leave: they are not here.")
        if twice := set(arriving) & (self.here - set(leaving)):
            raise CacheStateError(f"candidates {sorted(twice)} are here already.")
        for placed in arriving.values():
            _await(placed)
        gone = [self.spans[number] for number in leaving]
        for number, layer in enumerate(self.cache.attention_layers):
            self._change(layer, number, gone, list(arriving.values()))
        for number in leaving:
            del self.sizes[number]
        self.sizes |= {number: placed.nbytes for number, placed in arriving.items()}

    def _change(self, layer: CacheLayer, number: int, gone: list[tuple[int, int]], coming: list[Placed]) -> None:
        assert layer.rows is not None
        view = layer.rows.view()
        places = view.positions[0, 0].cpu().long()
        stays = torch.ones(len(places), dtype=torch.bool)
        for start, stop in gone:
            stays &= (places < start) | (places >= stop)
        blocks = [(placed.layers[number], _places(placed)) for placed in coming]
        cuts = sorted({0, len(places), *(int((places < placed.at).sum()) for placed in coming)})
        for low, high in pairwise(cuts):
            kept = stays[low:high]
            if not bool(kept.any()):
                continue
            keys, values = view.keys[0, :, low:high], view.values[0, :, low:high]
            own = places[low:high]
            if not bool(kept.all()):
                at = kept.nonzero()[:, 0]
                there = at.to(keys.device)
                keys, values, own = keys.index_select(1, there), values.index_select(1, there), own[at]
            blocks.append(((keys, values), own))
        blocks.sort(key=lambda block: int(block[1][0]))
        layer.rows = _rows(blocks, layer.seen, view.keys.device)
        layer.note_bytes()


def _places(placed: Placed) -> Tensor:
    return torch.arange(placed.at, placed.stop)


def _rows(blocks: Sequence[tuple[tuple[Tensor, Tensor], Tensor]], last: int, device: torch.device) -> DenseRows:
    """One rectangle of blocks of rows, with spare slots; a block: keys, values [heads, n, dim], and positions [n]."""
    (keys, values), _ = blocks[0]
    rows = sum(len(places) for _, places in blocks)
    room = rows + spare_slots(rows)
    key_room = keys.new_zeros(1, keys.shape[0], room, keys.shape[2], device=device)
    value_room = values.new_zeros(1, values.shape[0], room, values.shape[2], device=device)
    positions = torch.full((1, 1, room), -1, dtype=position_dtype(last))
    at = 0
    for (keys, values), places in blocks:
        stop = at + len(places)
        key_room[0, :, at:stop], value_room[0, :, at:stop], positions[0, 0, at:stop] = keys, values, places
        at = stop
    lengths = torch.full((1, key_room.shape[1]), rows)
    return DenseRows(key_room, value_room, positions.to(device), lengths)


def _await(placed: Placed) -> None:
    """Order what the present stream does next behind the copy that brought these rows."""
    if placed.ready is None:
        return
    device = placed.layers[0][0].device
    stream = torch.cuda.current_stream(device)
    stream.wait_event(placed.ready)
    for own in placed.layers:
        for tensor in own:
            tensor.record_stream(stream)
