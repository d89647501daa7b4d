"""What a forward call reads: how much attention each passage got, and how much the absent ones would have got.

An observed layer computes as it would; beside it the logits are taken once more for the weights. Attention of a query
is a softmax over all that is there: what is no passage (the head of the prompt, the question, the answer so far) takes
its part, and so do attention sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvfoundry.cache import KVCache
from kvfoundry.kernels.attention import AttentionKernel
from kvfoundry.rag.summaries import Shelf
from kvfoundry.visibility import Visibility

# Newest queries of a call that are held against the summaries; those of a whole question say little more.
LOOK = 8


@dataclass(frozen=True, eq=False)
class Look:
    """What one call read, as means over heads and observed layers, on the CPU.

    mass: [queries, candidates] attention that went to each candidate's rows; 0 where it has none here.
    estimated: [candidates] attention that each would have got from the newest queries, by its summary, if all were
    here; None without summaries.
    """

    mass: Tensor
    estimated: Tensor | None


class Observer:
    """Looks on in every layer that reads the whole past; in all layers of a model that has none of these.

    spans: places of the candidates, ascending. shelf: their summaries.
    """

    def __init__(self, cache: KVCache, spans: Sequence[tuple[int, int]], shelf: Shelf | None = None):
        self.shelf = shelf
        self._starts = torch.tensor([start for start, _ in spans])
        self._end = spans[-1][1]
        self._mass: list[Tensor] = []
        self._estimated: list[Tensor] = []
        layers = list(enumerate(cache.attention_layers))
        whole = [pair for pair in layers if pair[1].rule.span is None] or layers
        for number, layer in whole:
            layer.kernel = partial(self._attend, number, layer.kernel)

    def take(self) -> Look:
        """What was read since the last time."""
        mass = torch.stack(self._mass).mean(dim=0).cpu()
        estimated = torch.stack(self._estimated).mean(dim=0).cpu() if self._estimated else None
        self._mass, self._estimated = [], []
        return Look(mass, estimated)

    def forget(self) -> None:
        """Drop what was read, as of an attempt that does not count."""
        self._mass, self._estimated = [], []

    def _attend(
        self, layer: int, kernel: AttentionKernel, query: Tensor, key: Tensor, value: Tensor, visibility: Visibility,
        *, scaling: float, softcap: float | None = None, sinks: Tensor | None = None, **more: Any,
    ) -> Tensor:  # fmt: skip
        output = kernel(query, key, value, visibility, scaling=scaling, softcap=softcap, sinks=sinks, **more)
        self._look(layer, query, key, visibility, scaling, softcap, sinks)
        return output

    def _look(
        self, layer: int, query: Tensor, key: Tensor, visibility: Visibility, scaling: float, softcap: float | None,
        sinks: Tensor | None,
    ) -> None:  # fmt: skip
        _, query_heads, queries, dim = query.shape
        heads, rows = key.shape[1], key.shape[2]
        packed = query[0].reshape(heads, -1, dim)
        logits = (packed @ key[0].transpose(1, 2)).float().view(query_heads, queries, rows) * scaling
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if visibility.pattern != "full":
            logits = logits.masked_fill(~visibility.block(0, queries)[0], -torch.inf)
        total = logits.logsumexp(dim=-1)  # [query_heads, queries]
        if sinks is not None:
            total = torch.logaddexp(total, sinks.float()[:, None])
        owner = self._owner(visibility.key_positions[0, 0])
        spent = logits.new_zeros(query_heads, queries, len(self._starts) + 1)
        spent.index_add_(2, owner, (logits - total[..., None]).exp())
        spent = spent[..., :-1]
        self._mass.append(spent.mean(dim=0))
        if self.shelf is None:
            return
        look = min(queries, LOOK)
        newest = packed.view(heads, -1, queries, dim)[:, :, -look:].reshape(heads, -1, dim).float()
        promised = self.shelf.promised(layer, newest, scaling, softcap).view(query_heads, look, -1)
        others = total[:, -look:] + torch.log1p(-spent[:, -look:].sum(dim=-1).clamp(max=1 - 1e-6))
        whole = torch.logaddexp(others, promised.logsumexp(dim=-1))
        self._estimated.append((promised - whole[..., None]).exp().mean(dim=(0, 1)))

    def _owner(self, positions: Tensor) -> Tensor:
        """Whose every row is: a candidate's number, or one more for those of nobody. [rows]"""
        places = positions.long()
        own = torch.bucketize(places, self._starts.to(places.device), right=True) - 1
        nobody = (own < 0) | (places >= self._end) | (places < 0)
        return own.masked_fill(nobody, len(self._starts))
