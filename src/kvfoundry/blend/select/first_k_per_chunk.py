"""The first tokens of every chunk (EPIC, arXiv 2410.15332): each took the attention that the prompt's start gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfoundry.blend.select.base import Selector, sizes
from kvfoundry.blend.select.register import register

if TYPE_CHECKING:
    from kvfoundry.blend.blending import Blending


@register
@dataclass(frozen=True)
class FirstPerChunk(Selector):
    """As many tokens from the start of each chunk, as the ratio grants in all; chunks that are exact come last.

    A chunk that is shorter than its share leaves the rest to the others, and tokens that cannot be shared evenly go to
    the first chunks.
    """

    name = "first_k_per_chunk"
    summary = "the first k tokens of every chunk, with no look at the rows"
    source = "EPIC, arXiv 2410.15332"

    def choose(self, blending: Blending, ratio: float) -> list[Tensor]:
        context = blending.context
        chosen = []
        for pieces, size, exact in zip(context.pieces, sizes(blending, ratio), blending.exact, strict=True):
            moved = [(piece.at, piece.tokens) for piece in pieces if piece.at >= exact]
            kept = [(piece.at, piece.tokens) for piece in pieces if piece.at < exact]
            tokens: list[int] = []
            for group in (moved, kept):
                shares = even_shares(size - len(tokens), [length for _, length in group])
                for (at, _), share in zip(group, shares, strict=True):
                    tokens += range(at, at + share)
            chosen.append(torch.tensor(sorted(tokens), dtype=torch.long))
        return chosen


def even_shares(total: int, most: list[int]) -> list[int]:
    """`total` in even shares, none above its `most`; what does not divide goes to the first ones."""
    shares = [0] * len(most)
    left = min(total, sum(most))
    while left:
        open_ = [i for i, share in enumerate(shares) if share < most[i]]
        each, odd = divmod(left, len(open_))
        for rank, i in enumerate(open_):
            given = min(each + (rank < odd), most[i] - shares[i])
            shares[i] += given
            left -= given
    return shares
