"""No token at all: the re-positioned concatenation of the chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kvfoundry.blend.select.base import Selector
from kvfoundry.blend.select.register import register

if TYPE_CHECKING:
    from kvfoundry.blend.blending import Blending


@register
@dataclass(frozen=True)
class Nothing(Selector):
    """Full reuse, whatever the ratio."""

    name = "none"
    summary = "no token: chunks are only moved"
    source = "baseline"

    def choose(self, blending: Blending, ratio: float) -> list[Tensor]:
        return [tokens[:0] for tokens in blending.everything]
