"""Tokens that the question attends to (the idea of ProphetKV, arXiv 2602.02579): what is read should be right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfoundry.blend.select.base import Selector, best
from kvfoundry.blend.select.register import register
from kvfoundry.kernels.column_sums import column_sums

if TYPE_CHECKING:
    from kvfoundry.blend.blending import Blending
    from kvfoundry.layouts.base import Reading, RowsView


@register
@dataclass(frozen=True)
class QueryAware(Selector):
    """The question reads the reused rows first, in every layer; tokens are ranked by the attention that they get.

    Attention is summed over the question's tokens and all query heads, and layers weigh the same.
    """

    name = "query_aware"
    summary = "tokens that the question attends to in the reused rows"
    source = "the idea of ProphetKV, arXiv 2602.02579"
    asks = True

    def choose(self, blending: Blending, ratio: float) -> list[Tensor]:
        if ratio == 0:
            return [tokens[:0] for tokens in blending.everything]
        if ratio == 1:
            return blending.everything
        return best(attention_of_questions(blending), ratio, blending)


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
