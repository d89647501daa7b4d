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

    def renewed(self, rows: Layout, seen: Tensor) -> Sinks:
        """Taken again where nothing was dropped so far: a sequence may have been shorter than its sinks before."""
        whole = rows.lengths.amin(dim=1) >= seen
        if not bool(whole.any()):
            return self
        now = rows.view().keys[:, :, : self.keys.shape[2]]
        return Sinks(
            torch.where(whole.to(now.device)[:, None, None, None], now, self._for_heads(now.shape[1])), self.rope
        )

    def moved_into(self, rows: Layout, seen: Tensor) -> Layout:
        """The layout with its sinks directly in front of the recent rows. seen: [batch] real tokens, on the CPU."""
        view = rows.view()
        keys = self._for_heads(view.keys.shape[1])[:, :, : view.keys.shape[2]]
        dropped = (seen - rows.lengths.amax(dim=1)).to(keys.device)
        slot = torch.arange(keys.shape[2], device=keys.device)
        moved = self.rope.move(keys, slot.expand(keys.shape[0], 1, -1), slot + dropped[:, None, None])
        # A row is in front of the gap when it still is where it was stored; a small share keeps fewer sinks than asked.
        in_front = view.head_positions[:, :, : keys.shape[2]] == slot
        return rows.with_first_keys(torch.where(in_front[..., None], moved, view.keys[:, :, : keys.shape[2]]))

    def _for_heads(self, heads: int) -> Tensor:
        """The keys for rows that are meanwhile kept per query head."""
        return self.keys.repeat_interleave(heads // self.keys.shape[1], dim=1)

    def selected(self, indices: Tensor) -> Sinks:
        """The batch rows `indices`."""
        return Sinks(self.keys[indices.to(self.keys.device)], self.rope)
