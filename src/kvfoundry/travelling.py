"""What may travel through a model in place of the keys, and attend when it arrives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn


class TravellingKey(ABC):
    """Returned by the `update` of a cache; our attention function hands it the query."""

    family: str

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        mask: Any,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        module: nn.Module | None = None,
    ) -> Tensor:
        """Output [batch, query_heads, tokens, value_dim] for query [batch, query_heads, tokens, head_dim].

        mask: what the model's mask call returned.
        """
