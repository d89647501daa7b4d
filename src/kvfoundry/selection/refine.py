"""A second look at a ranking, once it is known how many rows each head keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kvfoundry.devices import carried, weight_of
from kvfoundry.errors import UnsupportedModelError
from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.keep import ranking

# The names under which transformers' attention modules keep their output projection.
_OUTPUT_PROJECTIONS = ("o_proj", "dense", "out_proj", "wo", "c_proj")

# Rows of values to project at once: bounds the transient [rows, hidden].
_ROWS = 1024


class Refinement(ABC):
    """Changes scores inside each head; the heads' budgets are already shared out."""

    @property
    def needs_module(self) -> bool:
        """True when the model's attention module must be at hand."""
        return False

    @abstractmethod
    def __call__(self, scores: Tensor, evidence: Evidence, counts: Tensor, protected: Tensor) -> Tensor:
        """New scores [batch, heads, rows].

        scores: [batch, heads, rows]; counts: [batch, heads] rows to keep, on the CPU; protected: [batch, heads, rows].
        """


@dataclass(frozen=True)
class ProjectedValues(Refinement):
    """The best `first` share of every head's budget stays; the rest is filled by score times projected value norm."""

    first: float = 0.5
    epsilon: float = 1e-4

    @property
    def needs_module(self) -> bool:
        return True

    def __call__(self, scores: Tensor, evidence: Evidence, counts: Tensor, protected: Tensor) -> Tensor:
        rank = torch.where(protected, 2, evidence.rows.valid.long())
        order = ranking(scores.expand_as(rank), rank).argsort(dim=-1, descending=True)
        sure = carried((counts.double() * self.first).long().clamp(min=1), scores.device)[..., None]
        places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
        decided = torch.zeros_like(protected).scatter(-1, order, places < sure)
        refined = (scores + self.epsilon) * evidence.once("projected_values", partial(self._norms, evidence))
        return refined.masked_fill(decided, torch.inf)

    def _norms(self, evidence: Evidence) -> Tensor:
        """Mean over the group of the L1 norm of W_o v: [batch, heads, rows]."""
        values = evidence.rows.values
        batch, heads, rows, dim = values.shape
        query_heads = evidence.query.shape[1]
        weight = _output_weight(evidence.module, query_heads * dim).to(values.device)
        norms = torch.zeros(batch, heads, rows, device=values.device)
        groups = query_heads // heads
        for query_head in range(query_heads):
            part = weight[:, query_head * dim : (query_head + 1) * dim].float()
            head = query_head // groups
            for start in range(0, rows, _ROWS):
                span = slice(start, start + _ROWS)
                norms[:, head, span] += (values[:, head, span].float() @ part.t()).abs().sum(dim=-1)
        return norms / groups


def output_projection(module: nn.Module | None) -> nn.Module | None:
    """The output projection of an attention module, None when it has none under a known name."""
    found = (getattr(module, name, None) for name in _OUTPUT_PROJECTIONS)
    return next((layer for layer in found if isinstance(getattr(layer, "weight", None), Tensor)), None)


def _output_weight(module: nn.Module | None, inputs: int) -> Tensor:
    """The weight [hidden, inputs] of the output projection."""
    if module is None:
        raise UnsupportedModelError(
            "critical selection projects values with the model's output weights; use it through KVCache(model)."
        )
    projection = output_projection(module)
    if projection is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} has no output projection named {', '.join(_OUTPUT_PROJECTIONS)}, "
            "which critical selection needs."
        )
    weight = weight_of(projection)
    if type(projection).__name__ == "Conv1D":  # GPT-2 stores its weight transposed
        weight = weight.t()
    if weight.dim() != 2 or weight.shape[1] != inputs or not weight.is_floating_point():
        raise UnsupportedModelError(
            f"{type(module).__name__}: its output projection does not read {inputs} value channels in plain floats, "
            "which critical selection needs."
        )
    return weight
