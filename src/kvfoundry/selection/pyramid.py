"""Layer budgets that fall along a straight line from the first layer to the last (PyramidKV)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvfoundry.checks import choice, number
from kvfoundry.selection.budgets import Amount, LayerBudget, LayerSpread, resolved
from kvfoundry.selection.protect import Protect

Rule = Literal["exact", "kvcache_factory", "adakv", "kvpress"]


def checked_pyramid(beta: object, rule: object) -> None:
    """SpecError unless the pyramid has a steepness of at least 1 and a known rule."""
    number("beta", beta, least=1)
    choice("rule", rule, ("exact", "kvcache_factory", "adakv", "kvpress"))


@dataclass(frozen=True)
class PyramidBudget(LayerBudget):
    """A pyramid of mean `value`: the last layer keeps 1 / beta of the mean, the first as much more than it.

    With B rows on average, W rows that every layer holds anyway (`reserve`), S tokens and L layers:

        b = B - W,  low = b / beta,  high = 2 b - low;  if high >= S - W:  high = S - W,  low = 2 b - high
        rows of layer l = W + high - l (high - low) / (L - 1)

    rule "exact": whole numbers that sum to L B, never more, falling from layer to layer, each at least W and 1.
        "kvcache_factory": the authors' arithmetic. low and the step between layers are floored, so the sum may exceed
        L B; every layer keeps B when S < 2 b. "adakv": the same without that exception (FFY0/AdaKV).
        "kvpress": W is part of the pyramid instead of coming on top, nothing is floored but each layer rounded, a share
        is not floored first, and every layer keeps B unless S >= high >= low >= W.
    A prompt of at most B tokens is never touched ("adakv": unless a layer has less room than that).
    """

    value: Amount
    reserve: int = 0
    beta: float = 20
    rule: Rule = "exact"

    @property
    def amount(self) -> Amount:
        return self.value

    def holding(self, protect: Protect) -> LayerBudget:
        # The published rules know the window only.
        return replace(self, reserve=protect.sinks + protect.recent) if self.rule == "exact" else self

    def rows(self, seen: Tensor, layer_idx: int, num_layers: int) -> Tensor:
        averages = resolved(self.value, seen).tolist()
        rows = [
            self._layer(average, tokens, layer_idx, num_layers)
            for average, tokens in zip(averages, seen.tolist(), strict=True)
        ]
        return torch.tensor([max(1, count) for count in rows], dtype=seen.dtype)

    def _layer(self, average: int, tokens: int, layer_idx: int, num_layers: int) -> int:
        if num_layers == 1 or (tokens <= average and self.rule != "adakv"):
            return average
        if self.rule == "kvpress":
            mean = self.value if isinstance(self.value, int) else tokens * self.value
            return self._rounded(mean, tokens, layer_idx, num_layers)
        if average <= self.reserve:
            return average
        if self.rule == "exact":
            return self.reserve + self._whole(average - self.reserve, tokens - self.reserve, num_layers)[layer_idx]
        return self.reserve + self._floored(average - self.reserve, tokens, layer_idx, num_layers)

    def _whole(self, mean: int, room: int, layers: int) -> list[int]:
        """Rows of every layer above the reserve, summing to `layers * mean`; room: most that a layer can use."""
        low = max(mean / self.beta, 0.0 if self.reserve else 1.0)
        high = 2 * mean - low
        if high >= room:
            high, low = room, 2 * mean - room
        step = (high - low) / (layers - 1)
        # A hair more, so that a whole number that came out of the division a little too small stays what it is.
        rows = [int(high - layer * step + 1e-9) for layer in range(layers)]
        missing = layers * mean - sum(rows)
        for layer in range(layers):
            if missing > 0 and rows[layer] < room:
                rows[layer] += 1
                missing -= 1
        return rows

    def _floored(self, mean: int, tokens: int, layer_idx: int, layers: int) -> int:
        if self.rule == "kvcache_factory" and tokens < 2 * mean:
            return mean
        low = int(mean // self.beta)
        high = 2 * mean - low
        if high >= tokens - self.reserve:
            high = tokens - self.reserve
            low = 2 * mean - high
        return high - layer_idx * ((high - low) // (layers - 1))

    def _rounded(self, mean: float, tokens: int, layer_idx: int, layers: int) -> int:
        low = mean / self.beta
        high = 2 * mean - low
        if high >= tokens - self.reserve:
            high = tokens - self.reserve
            low = 2 * mean - high
        if not tokens >= high >= low >= self.reserve:
            return round(mean)
        return round(high - layer_idx * ((high - low) / (layers - 1)))


@dataclass(frozen=True)
class PyramidLayers(LayerSpread):
    """A pyramid over the budget of any method."""

    beta: float = 20

    def over(self, amount: Amount) -> LayerBudget:
        return PyramidBudget(amount, beta=self.beta)
