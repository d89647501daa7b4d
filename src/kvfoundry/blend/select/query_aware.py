"""Tokens that the question attends to (the idea of ProphetKV, arXiv 2602.02579): what is read should be right.

Attention alone also takes tokens whose reused rows are right as they are. With a check layer it is weighed by how far
the rows are off: attention x |fresh value - reused value| is what a token adds to the error of what the question reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfoundry.blend.select.base import Selector, best
from kvfoundry.blend.select.deviation import Deviation
from kvfoundry.blend.select.register import register
from kvfoundry.checks import whole
from kvfoundry.kernels.column_sums import column_sums

if TYPE_CHECKING:
    from kvfoundry.blend.blending import Blending
    from kvfoundry.layouts.base import Reading, RowsView


@register
@dataclass(frozen=True)
class QueryAware(Selector):
    """The question reads the reused rows first, in every layer; tokens are ranked by the attention that they get.

    Attention is summed over the question's tokens and all query heads, and layers weigh the same.
    check: an attention layer, counted from 0, up to which all tokens are computed; the attention of a token is then
        multiplied by the distance of its values there from the reused ones. None: by attention alone.
    """

    check: int | None = None

    name = "query_aware"
    summary = "tokens that the question attends to in the reused rows"
    source = "the idea of ProphetKV, arXiv 2602.02579"
    asks = True

    def __post_init__(self) -> None:
        if self.check is not None:
            whole("check", self.check, least=1)

    @property
    def checks(self) -> tuple[int, ...]:
        return () if self.check is None else (self.check,)

    def choose(self, blending: Blending, ratio: float) -> list[Tensor]:
        if ratio == 0:
            return [tokens[:0] for tokens in blending.everything]
        if ratio == 1:
            return blending.everything
        scores = attention_of_questions(blending)
        if self.check is not None:
            fresh = blending.probe(blending.everything, self.check)
            change = Deviation().differences(blending, self.check, blending.everything, *fresh)
            scores = scores * change.sqrt().to(scores.device)
        return best(scores, ratio, blending)


def attention_of_questions(blending: Blending) -> Tensor:
    """Attention that every token of the context gets from the question, mean over layers: [batch, tokens]."""
    total = torch.zeros(len(blending.lengths), int(blending.lengths.max()), device=blending.feed.device)

    def listen(layer: int, query: Tensor, positions: Tensor, view: RowsView, reading: Reading) -> None:
        received = column_sums(
            query,
            view.keys,
            reading.visibility(positions, view.positions, own=False, complete=False),
            scaling=reading.scaling,
            softcap=reading.softcap,
            sinks=reading.sinks,
        ).sum(dim=1)[:, : total.shape[1]]
        total.add_(received.to(total.device))

    blending.ask(listen)
    return total / len(blending.layers)
