"""A-shape: the first rows and a window, for heads that look nowhere else. Nothing is estimated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvfoundry.checks import whole
from kvfoundry.kernels.sparse_prefill import BlockIndex, Tiles
from kvfoundry.sparse_prefill.patterns import Pattern, Sight, block_distances, listed


@dataclass(frozen=True)
class AShape(Pattern):
    """Every query reads the first `first` rows and at least the newest `local`, its own included."""

    first: int = 1024
    local: int = 4096

    def __post_init__(self) -> None:
        whole("first", self.first)
        whole("local", self.local, least=1)

    def whole(self, tiles: Tiles) -> bool:
        return self.local >= tiles.blocks * tiles.key_block

    @classmethod
    def index(cls, sight: Sight, heads: Tensor, patterns: Sequence[Self]) -> BlockIndex:
        tiles, device, batch = sight.tiles, sight.query.device, sight.query.shape[0]
        tops = sight.of_heads(tiles.tops, heads)
        first, local = (
            torch.tensor([getattr(pattern, name) for pattern in patterns], device=device) for name in ("first", "local")
        )
        offset = torch.arange(tiles.blocks * tiles.key_block, device=device)
        member = block_distances((offset < local[:, None]).float(), tiles) > 0
        # a band of rows lies in its own blocks, one more where it does not begin with a block, and those of the tile
        width = min(tiles.blocks, -(-max(pattern.local for pattern in patterns) // tiles.key_block) + tiles.ratio)
        member = member.expand(batch, -1, -1)
        distances, counts = listed(member, tops, width)
        column = torch.arange(max(pattern.first for pattern in patterns), device=device)
        beyond = tiles.blocks * tiles.key_block
        columns = torch.where(column < first[:, None], column, beyond).expand(batch, -1, -1)
        return BlockIndex.of(tiles, tops, distances, counts, columns, member)
