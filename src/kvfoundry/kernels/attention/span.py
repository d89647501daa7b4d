"""What queries that stand here and there in a text can see of it, block by block."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Span:
    """low, high: the lowest and the highest position that each column of queries sees over the batch, on the CPU.

    Both ascend; so every row in front of the lowest is there and seen by all.
    """

    low: Tensor
    high: Tensor
    _reach: dict[tuple[int, int, int, torch.device], Tensor] = field(default_factory=dict, repr=False)

    def of(self, start: int, stop: int) -> tuple[int, int]:
        """Rows that all of these columns see, and rows that any of them sees."""
        low, high = int(self.low[start:stop].min()), int(self.high[start:stop].max()) + 1
        return max(0, min(low, high - 1)), high

    def reach(self, queries: int, tile: int, rows: int, device: torch.device) -> Tensor:
        """`of` for every block of `queries` columns, int32 [blocks, 2] on the device; the first in whole tiles."""
        key = queries, tile, rows, device
        if key not in self._reach:
            found = [self.of(start, start + queries) for start in range(0, len(self.low), queries)]
            table = [(min(low, rows) // tile * tile, min(high, rows)) for low, high in found]
            self._reach[key] = torch.tensor(table, dtype=torch.int32).to(device)
        return self._reach[key]
