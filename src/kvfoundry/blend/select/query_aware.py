"""Tokens that the question attends to (the idea of ProphetKV, arXiv 2602.02579): what is read should be right.

Attention alone also takes tokens whose reused rows are right as they are. With a check layer it is weighed by how far
the rows are off: attention x |fresh value - reused value| is what a token adds to the error of what the question reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfoundry.blend.select.base import Selector, best, check_layers, widened
from kvfoundry.blend.select.deviation import Deviation
from kvfoundry.blend.select.register import register
from kvfoundry.checks import number
from kvfoundry.kernels.column_sums import column_sums

if TYPE_CHECKING:
    from kvfoundry.blend.blending import Blending
    from kvfoundry.layouts.base import Reading, RowsView


@register
@dataclass(frozen=True)
class QueryAware(Selector):
    """The question reads the reused rows first, in every layer; tokens are ranked by the attention that they get.

    Attention is summed over the question's tokens and all query heads, and layers weigh the same.
    check: an attention layer, counted from 0, up to which all tokens are computed; the attention of a token from there
        on is multiplied by the distance of its values there from the reused ones. Several layers filter gradually: the
        first keeps `widen` times the ratio, the last the ratio itself. None: by attention alone.
    """

    check: int | tuple[int, ...] | None = None
    widen: float = 2.5

    name = "query_aware"
    summary = "tokens that the question attends to in the reused rows"
    source = "the idea of ProphetKV, arXiv 2602.02579"
    asks = True

    def __post_init__(self) -> None:
        if self.check is not None:
            check_layers(self.name, self.checks)
        number("widen", self.widen, least=1.0)

    @property
    def checks(self) -> tuple[int, ...]:
        if self.check is None:
            return ()
        return self.check if isinstance(self.check, tuple) else (self.check,)

    def choose(self, blending: Blending, ratio: float) -> list[Tensor]:
        if ratio == 0:
            return [tokens[:0] for tokens in blending.everything]
        if ratio == 1:
            return blending.everything
        if not self.checks:
            return best(attention_of_questions(blending), ratio, blending)
        chosen, attention = blending.everything, None
        blending.feed.start(range(self.checks[0], len(blending.layers)))
        for stage, layer in enumerate(self.checks):
            keys, values = blending.probe(chosen, layer)
            change = Deviation().differences(blending, layer, chosen, keys, values).sqrt()
            if attention is None:  # in the layers in front of the first check every row is fresh by now
                attention = attention_of_questions(blending, layer)
            scores = attention * change.to(attention.device)
            chosen = best(scores, widened(ratio, self.widen, stage, len(self.checks)), blending, chosen)
        return chosen


def attention_of_questions(blending: Blending, first: int = 0) -> Tensor:
    """Attention that every token of the context gets from the question, mean from layer `first` on: [batch, tokens]."""
    total = torch.zeros(len(blending.lengths), int(blending.lengths.max()), device=blending.device)

    def listen(layer: int, query: Tensor, positions: Tensor, view: RowsView, reading: Reading) -> None:
        if layer < first:
            return
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
    return total / (len(blending.layers) - first)
