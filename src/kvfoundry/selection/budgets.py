"""How many rows a layer and its heads may keep."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfoundry.errors import SpecError
from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.protect import Protect

# An int is rows per KV head and layer on average; a float in (0, 1] is the kept share of the tokens seen.
Amount = int | float


def checked_amount(amount: object, name: str = "budget") -> Amount:
    """The amount itself, or SpecError naming what a budget may be."""
    if isinstance(amount, bool) or not isinstance(amount, (int, float)):
        raise SpecError(f"{name} must be a number of rows (int) or a kept share in (0, 1] (float), got {amount!r}.")
    if isinstance(amount, int):
        if amount < 1:
            raise SpecError(f"{name}={amount} keeps nothing; give at least 1 row, or a share such as 0.25.")
    elif math.isnan(amount) or not 0.0 < amount <= 1.0:
        raise SpecError(f"{name}={amount} is not a share in (0, 1]; write an int for a number of rows.")
    return amount


def resolved(amount: Amount, seen: Tensor) -> Tensor:
    """Rows for every batch row: [batch] integers, at least 1.

    seen: [batch] real tokens. A share rounds down, as the published ratio methods do.
    """
    if isinstance(amount, int):
        return torch.full_like(seen, amount)
    return torch.tensor([max(1, int(int(tokens) * amount)) for tokens in seen], dtype=seen.dtype)


@dataclass(frozen=True)
class ModelShape:
    """What a method may want to know of a model: its layers, those with full attention, and the heads of a layer.

    identity: what tells this model from another (`kvfoundry.calibration.identity_of`), for what was measured on one.
    """

    family: str
    layers: int
    full_layers: tuple[int, ...]
    query_heads: int
    kv_heads: int
    identity: Callable[[], dict[str, Any]] = dict


class LayerBudget(ABC):
    """Rows per KV head of one layer, averaged over its heads."""

    @property
    @abstractmethod
    def amount(self) -> Amount:
        """What the user asked for."""

    @abstractmethod
    def rows(self, seen: Tensor, layer_idx: int, num_layers: int) -> Tensor:
        """[batch] rows for layer `layer_idx` of `num_layers`, given the real tokens `seen` [batch]. At least 1 each."""

    def holding(self, protect: Protect) -> LayerBudget:
        """The budget that knows what every layer has to protect; called once, when the recipe is complete."""
        return self

    def fitted(self, shape: ModelShape) -> LayerBudget:
        """The budget for this model; SpecError when it was made for another. Called when a cache is built."""
        return self


class LayerSpread(ABC):
    """A refinement of a uniform budget: the same total, shared unevenly among the layers."""

    @abstractmethod
    def over(self, amount: Amount) -> LayerBudget:
        """The layer budget that spreads an average of `amount`."""


@dataclass(frozen=True)
class UniformBudget(LayerBudget):
    """The same number of rows in every layer."""

    value: Amount

    @property
    def amount(self) -> Amount:
        return self.value

    def rows(self, seen: Tensor, layer_idx: int, num_layers: int) -> Tensor:
        return resolved(self.value, seen)


class HeadBudget(ABC):
    """How the rows of one layer are shared among its heads."""

    def fitted(self, shape: ModelShape) -> HeadBudget:
        """Like `LayerBudget.fitted`."""
        return self

    def settled(self, evidence: Evidence, rows: Tensor) -> bool:
        """True when nothing has to go, known without scores. rows: [batch] average per head."""
        return not bool((evidence.rows.lengths > rows[:, None]).any())

    @abstractmethod
    def allocate(self, scores: Tensor, evidence: Evidence, rows: Tensor, protected: Tensor) -> Tensor:
        """Rows each head keeps: [batch, heads] on the CPU, never more than it has, never fewer than its protected rows.

        scores: [batch, heads or 1, rows]; rows: [batch] average per head; protected: boolean [batch, heads, rows].
        """


@dataclass(frozen=True)
class UniformHeads(HeadBudget):
    """Every head keeps the same number of rows."""

    def allocate(self, scores: Tensor, evidence: Evidence, rows: Tensor, protected: Tensor) -> Tensor:
        return torch.minimum(evidence.rows.lengths, rows[:, None])
