"""The contract of a pattern, and what all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvfoundry.kernels.attention.naive import query_block
from kvfoundry.kernels.sparse_prefill import BlockIndex, Tiles


@dataclass(frozen=True, eq=False)
class Sight:
    """What a pattern is chosen from: the queries of one call and the keys in front of them.

    query: [batch, query_heads, queries, head_dim], real ones first; key: [batch, heads, rows, head_dim]. scaling,
    softcap, sinks: the model's terms of the logits.
    """

    query: Tensor
    key: Tensor
    tiles: Tiles
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def query_heads(self) -> int:
        return self.query.shape[1]

    @property
    def groups(self) -> int:
        """Query heads per stored head."""
        return self.query.shape[1] // self.key.shape[1]

    def of_heads(self, tensor: Tensor, heads: Tensor) -> Tensor:
        """[batch, heads, ...] of stored heads, for some query heads."""
        return tensor.index_select(1, heads // self.groups)

    def expanded(self, tensor: Tensor) -> Tensor:
        """[batch, heads, ...] of stored heads, for every query head."""
        return self.tiles.per_query_head(tensor, self.query_heads)


class Pattern(ABC):
    """One way for a head to read a prompt. Frozen, with sizes in tokens; one object serves every layer and call."""

    @abstractmethod
    def whole(self, tiles: Tiles) -> bool:
        """Whether every tile reads every block it can see, whatever queries and keys are."""

    @classmethod
    @abstractmethod
    def index(cls, sight: Sight, heads: Tensor, patterns: Sequence[Self]) -> BlockIndex:
        """What some query heads read. heads: [n] their numbers; patterns: that of each, all of this very kind."""


def piece(sight: Sight, per_row: int) -> int:
    """How many rows, or tiles, to take at once when each costs so many elements per batch row and query head.

    So the memory of an estimate is linear in the tokens.
    """
    return query_block(sight.query.device, sight.query.shape[0], sight.query_heads, per_row)


def block_distances(offsets: Tensor, tiles: Tiles) -> Tensor:
    """The largest value among the offsets that a block holds: [..., blocks] from [..., blocks * key_block].

    offsets: a value for every distance between a query and a row. The block at distance e from the end of a tile holds
    offsets from (e - ratio) key_block + 1 to (e + 1) key_block - 1, so a line of one offset lies in up to ratio + 1 of
    them.
    """
    parts = offsets.unflatten(-1, (-1, tiles.key_block))
    best = parts.amax(dim=-1)
    found = best
    for back in range(1, tiles.ratio):
        found = torch.maximum(found, _moved(best, back))
    if tiles.key_block > 1:
        found = torch.maximum(found, _moved(parts[..., 1:].amax(dim=-1), tiles.ratio))
    return found


def listed(member: Tensor, tops: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Distances [batch, heads, 1, width] in ascending order, and counts [batch, heads, number], of marked blocks.

    member: boolean [batch, heads, blocks] by distance, at most `width` of them marked. tops: [batch, heads, number].
    """
    blocks = member.shape[-1]
    distance = torch.arange(blocks, device=member.device)
    distances = torch.where(member, distance, blocks).sort(dim=-1).values[..., :width]
    return distances[:, :, None], member.cumsum(dim=-1).gather(2, tops.clamp(min=0)) * (tops >= 0)


def _moved(values: Tensor, places: int) -> Tensor:
    """Values further along the last dimension, with the lowest number in front."""
    lowest = False if values.dtype == torch.bool else -torch.inf
    kept = values[..., : max(0, values.shape[-1] - places)]
    return torch.nn.functional.pad(kept, (values.shape[-1] - kept.shape[-1], 0), value=lowest)
