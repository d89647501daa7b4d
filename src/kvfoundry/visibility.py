"""Who may see whom: causality, windows and padding, all built from the token index of every row.

Storage length never decides what a query sees; the stored positions do. That is what lets heads, layers and batch rows
keep different rows.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Pattern = Literal["causal", "full", "behind", "masked"]


@dataclass(frozen=True)
class WindowRule:
    """Which past a layer may read, beyond causality.

    `sliding` W: the last W tokens, the query's own included. `chunked` C: only tokens of the query's own block of C.
    Neither set: the whole past.
    """

    sliding: int | None = None
    chunked: int | None = None

    @property
    def span(self) -> int | None:
        """Tokens that a query can reach back to at most, itself included; None when unbounded."""
        return self.sliding or self.chunked

    def allows(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Causality and window as a boolean tensor, broadcast over both arguments."""
        seen = key_positions <= query_positions
        if self.sliding is not None:
            seen = seen & (key_positions > query_positions - self.sliding)
        if self.chunked is not None:
            same_chunk = torch.div(key_positions, self.chunked, rounding_mode="floor") == torch.div(
                query_positions, self.chunked, rounding_mode="floor"
            )
            seen = seen & same_chunk
        return seen


WHOLE_PAST = WindowRule()


@dataclass(frozen=True)
class Visibility:
    """The mask of one attention call, kept symbolic so that kernels build it block by block.

    query_positions: [batch, queries], -1 where a query is padding (its output is discarded).
    key_positions: [batch, heads or 1, rows], -1 where there is no row.
    pattern: what a kernel may assume. "full": every query sees every row. "causal": rows are the queries' own tokens,
        in order, so the lower triangle is the mask. "behind": so are the last rows, and every row in front of them is
        seen by all queries. "masked": ask `block`.
    unread_distance: rows exactly this many tokens behind a query are skipped (see the `leaving` parameter of h2o).
    """

    query_positions: Tensor
    key_positions: Tensor
    pattern: Pattern
    rule: WindowRule = WHOLE_PAST
    unread_distance: int | None = None

    def block(self, start: int, stop: int) -> Tensor:
        """Boolean mask [batch, heads or 1, stop - start, rows] for the queries from `start` to `stop`."""
        query = self.query_positions[:, None, start:stop, None]
        key = self.key_positions[:, :, None, :]
        seen = self.rule.allows(query, key) & (key >= 0)
        if self.unread_distance is not None:
            seen = seen & (key != query - self.unread_distance)
        # A padded query would see nothing, and softmax over nothing is NaN. Its output is discarded, so it sees all.
        return seen | (query < 0)
