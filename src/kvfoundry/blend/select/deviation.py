"""High key-value deviation (CacheBlend, arXiv 2405.16444): tokens whose rows differ most from the reused ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvfoundry.blend.select.base import Selector, best, check_layers, widened
from kvfoundry.blend.select.register import register
from kvfoundry.checks import choice, number

if TYPE_CHECKING:
    from kvfoundry.blend.blending import Blending


@register
@dataclass(frozen=True)
class Deviation(Selector):
    """All tokens are computed up to the keys and values of layer `check`; those that differ most there go on.

    check: an attention layer, counted from 0, or several: the paper's gradual filtering, in which the first keeps
        `widen` times the ratio, the following ones less and less, and the last the ratio itself.
    by: what is compared, as the squared difference summed over heads and channels: "values" (CacheBlend's code),
        "keys" after the move (LMCache), or "both".
    update: which rows of a check layer are replaced: those of "chosen" tokens (LMCache), or "all" that were computed
        (CacheBlend's code). In the layers before, all are. A ratio of 0 needs no check and reuses every row; only with
        "all" the check layers are computed all the same.
    """

    check: int | tuple[int, ...] = 1
    by: Literal["values", "keys", "both"] = "values"
    update: Literal["chosen", "all"] = "chosen"
    widen: float = 1.5

    name = "deviation"
    summary = "tokens whose keys or values differ most from the reused ones in a check layer"
    source = "CacheBlend, arXiv 2405.16444"

    def __post_init__(self) -> None:
        check_layers(self.name, self.checks)
        choice("by", self.by, ("values", "keys", "both"))
        choice("update", self.update, ("chosen", "all"))
        number("widen", self.widen, least=1.0)

    @property
    def checks(self) -> tuple[int, ...]:
        return self.check if isinstance(self.check, tuple) else (self.check,)

    def choose(self, blending: Blending, ratio: float) -> list[Tensor]:
        chosen = blending.everything
        if ratio == 1:
            return chosen
        if ratio == 0 and self.update == "chosen":
            return [tokens[:0] for tokens in chosen]
        # The layers in front of the first check are computed whole, so their reused rows are not asked for.
        blending.feed.start(range(self.checks[0], len(blending.layers)))
        for stage, layer in enumerate(self.checks):
            keys, values = blending.probe(chosen, layer)
            scores = self.differences(blending, layer, chosen, keys, values)
            if self.update == "all":
                blending.write(layer, chosen, keys, values)
            chosen = best(scores, widened(ratio, self.widen, stage, len(self.checks)), blending, chosen)
        return chosen

    def differences(self, blending: Blending, layer: int, tokens: list[Tensor], keys: Tensor, values: Tensor) -> Tensor:
        """Squared difference of fresh and reused rows, summed over heads and channels: [batch, tokens] in float32.

        Tokens that were not computed, heads in which a token has no row, and differences that are no more than rounding
        count as equal.
        """
        epsilon = torch.finfo(keys.dtype).eps
        rounding = 16 * epsilon if epsilon < 1e-5 else 2 * epsilon
        rows = blending.rows(layer)
        keys, values = rows.for_heads(keys), rows.for_heads(values)
        pairs = {"keys": [(keys, rows.keys)], "values": [(values, rows.values)]}
        compared = pairs[self.by] if self.by != "both" else [*pairs["keys"], *pairs["values"]]
        scores = torch.zeros(len(tokens), rows.keys.shape[2], device=rows.keys.device)
        for row, own in enumerate(tokens):
            slots = own.to(rows.keys.device)
            stored = rows.positions[row][:, slots] >= 0
            for fresh, reused in compared:
                now = fresh[row, :, : len(own)].float()
                change = (now - reused[row][:, slots].float()).square().sum(dim=-1)
                differs = change > rounding**2 * now.square().sum(dim=-1)
                scores[row, slots] += (change * (stored & differs)).sum(dim=0)
        return scores
