"""The contract of a selector: which tokens of the reused context are computed again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvfoundry.errors import SpecError

if TYPE_CHECKING:
    from kvfoundry.blend.blending import Blending


class Selector(ABC):
    """A rule for the choice of tokens; its fields are its parameters in a spec. Frozen, without state.

    name: in specs; summary: one line for listings; source: where it was published; asks: it reads the question.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    asks: ClassVar[bool] = False

    @property
    def checks(self) -> tuple[int, ...]:
        """Attention layers up to which all tokens are computed in order to choose; empty where none is."""
        return ()

    @abstractmethod
    def choose(self, blending: Blending, ratio: float) -> list[Tensor]:
        """Token indices of every batch row, ascending, on the CPU: int(ratio x tokens) of them each."""


def check_layers(name: str, layers: tuple[object, ...]) -> None:
    """SpecError unless these are check layers: from 1 on, in rising order."""
    numbers = [layer for layer in layers if isinstance(layer, int) and not isinstance(layer, bool) and layer >= 1]
    if not layers or len(numbers) != len(layers) or numbers != sorted(set(numbers)):
        raise SpecError(
            f"{name}: check must be a layer from 1 on, or several in rising order, got {layers!r} "
            "(in layer 0 a row depends on nothing but its token)."
        )


def widened(ratio: float, widen: float, stage: int, stages: int) -> float:
    """The share of tokens that a check keeps: of several, the first `widen` times the ratio, the last the ratio."""
    last = stages - 1
    return ratio if last == 0 else min(1.0, ratio * (widen + (1.0 - widen) * stage / last))


def sizes(blending: Blending, ratio: float) -> list[int]:
    """How many tokens of every batch row a ratio stands for: rounded down, as in the published code."""
    return [int(int(length) * ratio) for length in blending.lengths]


def best(scores: Tensor, ratio: float, blending: Blending, among: list[Tensor] | None = None) -> list[Tensor]:
    """The tokens with the highest scores; of equal ones the earlier. Those whose reused rows are exact come last.

    scores: [batch, tokens]; among: the candidates of every batch row, all tokens by default.
    """
    chosen = []
    among = among or blending.everything
    for own, tokens, size, exact in zip(
        scores.double().cpu(), among, sizes(blending, ratio), blending.exact, strict=True
    ):
        ranked = own[tokens].masked_fill(tokens < exact, -torch.inf)
        order = ranked.argsort(descending=True, stable=True)
        chosen.append(tokens[order[:size]].sort().values)
    return chosen
