"""Slot positions: rows that drop out leave no gap in the distances that attention sees (StreamingLLM's own form).

RoPE depends on distances only. The recent rows keep their distance to the newest query as they are, so only the sinks
have to move up by the number of rows dropped between them and the window. Each move starts from the key as it was
computed: errors do not add up over thousands of steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfoundry.layouts import Layout
from kvfoundry.rope import Rope


@dataclass(frozen=True)
class Sinks:
    """keys: [batch, heads, sinks, head_dim] as computed at positions 0, 1, ...; rope: the layer's embedding."""

    keys: Tensor
    rope: Rope

    @classmethod
    def taken_from(cls, rows: Layout, count: int, rope: Rope) -> Sinks:
        """The first `count` rows of every head, before any of them moved."""
        return cls(rows.view().keys[:, :, :count].clone(), rope)

    def moved_into(self, rows: Layout, seen: Tensor) -> Layout:
        """The layout with its sinks directly in front of the recent rows. seen: [batch] real tokens, on the CPU."""
        dropped = (seen - rows.lengths.amax(dim=1)).to(self.keys.device)
        home = torch.arange(self.keys.shape[2], device=self.keys.device).expand(self.keys.shape[0], 1, -1)
        moved = self.rope.move(self.keys, home, home + dropped[:, None, None])
        return rows.with_first_keys(moved)

    def selected(self, indices: Tensor) -> Sinks:
        """The batch rows `indices`."""
        return Sinks(self.keys[indices.to(self.keys.device)], self.rope)
