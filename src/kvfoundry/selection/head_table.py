"""Importance of every head of one model, measured once, and the budgets that follow from it (HeadKV)."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kvfoundry.errors import SpecError
from kvfoundry.selection.budgets import Amount, HeadBudget, LayerBudget, ModelShape, resolved
from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.shares import shared_out

Rule = Literal["exact", "authors", "kvcache_factory"]

_KEY = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True)
class HeadTable:
    """One non-negative score per head, [layers][heads]; heads are query heads or KV heads."""

    scores: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        widths = {len(row) for row in self.scores}
        if len(widths) != 1 or 0 in widths:
            raise SpecError("a head table needs the same number of heads, at least one, in every layer.")
        if not all(math.isfinite(score) and score >= 0 for row in self.scores for score in row):
            raise SpecError("the scores of a head table must be finite and not negative.")
        if not any(score > 0 for row in self.scores for score in row):
            raise SpecError("a head table whose scores are all 0 ranks no head.")

    @classmethod
    def read(cls, source: Any) -> HeadTable:
        """From a JSON file in the published form, {"layer-head": score or list of scores}, or from nested tuples.

        Lists of scores (one per probe) count with their mean. Layers are taken in ascending order; a hybrid model's
        table may name all its layers or only those with full attention.
        """
        if isinstance(source, (str, Path)):
            return cls(_from_file(Path(source).expanduser()))
        if not isinstance(source, tuple) or not all(isinstance(row, tuple) for row in source):
            raise SpecError(f"table must be a path to a JSON file or ((score, ...) per layer, ...), got {source!r}.")
        if not all(_is_number(score) for row in source for score in row):
            raise SpecError("the scores of a head table must be numbers.")
        return cls(tuple(tuple(float(score) for score in row) for row in source))

    @property
    def layers(self) -> int:
        return len(self.scores)

    @property
    def heads(self) -> int:
        return len(self.scores[0])

    def fitted(self, shape: ModelShape) -> HeadTable:
        """The table of this model's full-attention layers; SpecError when it was measured on another model."""
        self.check(shape.family, {shape.layers, len(shape.full_layers)}, {shape.query_heads, shape.kv_heads})
        if self.layers == len(shape.full_layers) or not shape.full_layers:
            return self
        return HeadTable(tuple(self.scores[layer] for layer in shape.full_layers))

    def check(self, family: str, layers: set[int], heads: set[int]) -> None:
        """SpecError unless the table has one of these numbers of layers and of heads."""
        if self.layers not in layers or self.heads not in heads:
            wanted = [" or ".join(map(str, sorted(counts, reverse=True))) for counts in (layers, heads)]
            raise SpecError(
                f"the head table has {self.layers} layers of {self.heads} heads, {family} has {wanted[0]} layers of "
                f"{wanted[1]} heads; measure one for it with `kvfoundry analyze heads`."
            )

    def capacities(self, mean: int, beta: float, temperature: float) -> np.ndarray:
        """Rows per head, [layers, heads] in float64, of the given mean: (mean - pool) + share of all pools.

        The pool is what a head gives into the competition, mean // beta; share: score ** temperature, normalized.
        """
        shares = np.array(self.scores, dtype=np.float64)
        shares = shares / shares.sum()
        if temperature != 1:
            shares = shares**temperature
            shares = shares / shares.sum()
        pool = mean // beta
        return np.asarray(shares * (pool * shares.size) + (mean - pool))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _from_file(path: Path) -> tuple[tuple[float, ...], ...]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise SpecError(f"cannot read the head table {str(path)!r}: {reason}.") from error
    if not isinstance(content, dict) or not content:
        raise SpecError(f'the head table {str(path)!r} must map "layer-head" to a score.')
    scores: dict[int, dict[int, float]] = {}
    for key, value in content.items():
        place = _KEY.fullmatch(key)
        values = value if isinstance(value, list) else [value]
        if place is None or not values or not all(_is_number(score) for score in values):
            raise SpecError(f'the head table {str(path)!r} must map "layer-head" to scores; it has {key!r}: {value!r}.')
        scores.setdefault(int(place[1]), {})[int(place[2])] = float(np.mean(values))
    heads = max(max(row) for row in scores.values()) + 1
    for layer, row in scores.items():
        missing = [head for head in range(heads) if head not in row]
        if missing:
            raise SpecError(f"the head table {str(path)!r} has no score for head {missing[0]} of layer {layer}.")
    return tuple(tuple(scores[layer][head] for head in range(heads)) for layer in sorted(scores))


@dataclass(frozen=True)
class TableBudget(LayerBudget):
    """Layers get what their heads get together; the arithmetic is that of `TableHeads`.

    reserve: rows that every head keeps on top, the window in the published methods.
    """

    value: Amount
    table: HeadTable
    reserve: int = 0
    beta: float = 1.01
    temperature: float = 1.0
    rule: Rule = "exact"

    @property
    def amount(self) -> Amount:
        return self.value

    def holding(self, protect: Protect) -> LayerBudget:
        # The published rules know the window only.
        return replace(self, reserve=protect.sinks + protect.recent) if self.rule == "exact" else self

    def fitted(self, shape: ModelShape) -> TableBudget:
        return replace(self, table=self.table.fitted(shape))

    def rows(self, seen: Tensor, layer_idx: int, num_layers: int) -> Tensor:
        averages = resolved(self.value, seen).tolist()
        rows = [
            average if tokens <= average else self._layer(average, layer_idx)
            for average, tokens in zip(averages, seen.tolist(), strict=True)
        ]
        return torch.tensor([max(1, count) for count in rows], dtype=seen.dtype)

    def _layer(self, average: int, layer_idx: int) -> int:
        if average <= self.reserve or layer_idx >= self.table.layers:
            return average
        # KVCache-Factory forgets to take the window off, so its heads keep that many rows more.
        mean = average if self.rule == "kvcache_factory" else average - self.reserve
        return self.reserve + int(self.table.capacities(mean, self.beta, self.temperature)[layer_idx].mean() + 1e-9)


@dataclass(frozen=True)
class TableHeads(HeadBudget):
    """Head budgets from a table, the same for every prompt.

    With b rows on average above the `reserve` and p_h the head's share of the sum of all scores of the model (raised to
    `temperature` and normalized again):

        rows of head h = reserve + p_h (b // beta) (all heads) + b - b // beta

    beta: 1 puts all rows into the competition, large values share them evenly. A KV head has the mean of its query
    heads.

    rule "exact": whole numbers whose sum over the model never exceeds the budget; what a head has no rows for goes to
        the others of its layer. "authors": every head rounded by itself, nothing redistributed (FYYFU/HeadKV).
        "kvcache_factory": the same with b the whole budget, so every head keeps about `reserve` rows more.
    A prompt of at most the budget is never touched.
    """

    budget: TableBudget

    def fitted(self, shape: ModelShape) -> HeadBudget:
        return replace(self, budget=self.budget.fitted(shape))

    def settled(self, evidence: Evidence, rows: Tensor) -> bool:
        if self.budget.rule == "exact":
            return super().settled(evidence, rows)
        return bool((evidence.seen <= resolved(self.budget.value, evidence.seen)).all())

    def allocate(self, scores: Tensor, evidence: Evidence, rows: Tensor, protected: Tensor) -> Tensor:
        budget, lengths = self.budget, evidence.rows.lengths
        query_heads, stored_heads = evidence.query.shape[1], lengths.shape[1]
        shared = stored_heads == query_heads and query_heads % budget.table.heads == 0  # a table of KV heads, repeated
        fitting = {query_heads, stored_heads, budget.table.heads} if shared else {query_heads, stored_heads}
        budget.table.check("the model", {evidence.num_layers}, fitting)
        fixed, averages = protected.sum(dim=-1).cpu(), resolved(budget.value, evidence.seen).tolist()
        result = []
        for row, (average, tokens) in enumerate(zip(averages, evidence.seen.tolist(), strict=True)):
            held, stored = fixed[row].tolist(), lengths[row].tolist()
            free = [count - kept for count, kept in zip(stored, held, strict=True)]
            wishes = self._wishes(average, evidence.layer_idx, len(stored))
            if budget.rule != "exact":
                shares = (
                    free
                    if tokens <= average
                    else [min(int(wish), most) for wish, most in zip(wishes, free, strict=True)]
                )
            else:
                total = int(rows[row]) * len(stored) - sum(held)
                scale = total / sum(wishes) if sum(wishes) > 0 else 0.0
                least = [int(kept == 0 and most > 0) for kept, most in zip(held, free, strict=True)]
                shares = shared_out([wish * scale for wish in wishes], least, free, total)
            result.append([kept + share for kept, share in zip(held, shares, strict=True)])
        return torch.tensor(result)

    def _wishes(self, average: int, layer_idx: int, heads: int) -> list[float]:
        """Rows above the reserve for each of the stored heads of this layer."""
        budget = self.budget
        mean = average if budget.rule == "kvcache_factory" else max(average - budget.reserve, 1)
        capacities = budget.table.capacities(mean, budget.beta, budget.temperature)[layer_idx]
        if budget.rule != "exact":
            capacities = capacities.round()
        if heads < len(capacities):
            capacities = capacities.reshape(heads, -1).mean(axis=1)
            if budget.rule != "exact":
                capacities = capacities.astype(np.float32).round()
        elif heads > len(capacities):
            capacities = capacities.repeat(heads // len(capacities))
        wishes: list[float] = capacities.tolist()
        return wishes
