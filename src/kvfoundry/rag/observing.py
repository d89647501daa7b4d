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
class Read:
    """What candidates get from the newest queries of a call, on the CPU: [candidates] each.

    mass: attention for all rows of a candidate, as a mean over heads, layers and queries. focus: the largest weight
    that one of its rows (or pages, where only those are known) has, as the root of the mean square. Most heads spread
    their attention by place, whatever is said there; the square lets the few speak that pick out one passage.
    """

    mass: Tensor
    focus: Tensor


@dataclass(frozen=True, eq=False)
class Look:
    """What one call read. mass: [queries, candidates] attention that each got, as a mean over heads and layers.

    spent: by the rows that are here, 0 where a candidate has none. estimated: what each would have got if all were
    here, by its summary; None without summaries.
    """

    mass: Tensor
    spent: Read
    estimated: Read | None


class Observer:
    """Looks on in every layer that reads the whole past; in all layers of a model that has none of these.

    spans: places of the candidates, ascending. shelf: their summaries.
    """

    def __init__(self, cache: KVCache, spans: Sequence[tuple[int, int]], shelf: Shelf | None = None):
        self.shelf = shelf
        self._starts = torch.tensor([start for start, _ in spans])
        self._end = spans[-1][1]
        self._mass: list[Tensor] = []
        self._spent: list[tuple[Tensor, Tensor]] = []
        self._estimated: list[tuple[Tensor, Tensor]] = []
        layers = list(enumerate(cache.attention_layers))
        whole = [pair for pair in layers if pair[1].rule.span is None] or layers
        for number, layer in whole:
            layer.kernel = partial(self._attend, number, layer.kernel)

    def take(self) -> Look:
        """What the last call read."""
        mass = torch.stack(self._mass).mean(dim=0).cpu()
        look = Look(mass, _read(self._spent), _read(self._estimated) if self._estimated else None)
        self.forget()
        return look

    def forget(self) -> None:
        """Drop what was read and not taken."""
        self._mass, self._spent, self._estimated = [], [], []

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
            seen = visibility.block(0, queries)[0]
            seen = seen if len(seen) == 1 else seen.repeat_interleave(query_heads // heads, dim=0)
            logits = logits.masked_fill(~seen, -torch.inf)
        total = logits.logsumexp(dim=-1)  # [query_heads, queries]
        if sinks is not None:
            total = torch.logaddexp(total, sinks.float()[:, None])
        owner = self._owner(visibility.key_positions[0, 0])
        weights, look = (logits - total[..., None]).exp(), min(queries, LOOK)
        spent = _sums(weights, owner, len(self._starts))
        self._mass.append(spent.mean(dim=0))
        spent = spent[:, -look:]
        self._spent.append((spent.mean(dim=(0, 1)), _square_peaks(weights[:, -look:], owner, len(self._starts))))
        if self.shelf is None:
            return
        newest = packed.view(heads, -1, queries, dim)[:, :, -look:].reshape(heads, -1, dim).float()
        promised = self.shelf.promised(layer, newest, scaling, softcap).view(query_heads, look, -1)
        others = total[:, -look:] + torch.log1p(-spent.sum(dim=-1).clamp(max=1 - 1e-6))
        whole = torch.logaddexp(others, promised.logsumexp(dim=-1))
        pages, owner = (promised - whole[..., None]).exp(), self.shelf.owner
        estimated = _sums(pages, owner, len(self._starts)).mean(dim=(0, 1))
        self._estimated.append((estimated, _square_peaks(pages, owner, len(self._starts))))

    def _owner(self, positions: Tensor) -> Tensor:
        """Whose every row is: a candidate's number, or one more for those of nobody. [rows]"""
        places = positions.long()
        own = torch.bucketize(places, self._starts.to(places.device), right=True) - 1
        nobody = (own < 0) | (places >= self._end) | (places < 0)
        return own.masked_fill(nobody, len(self._starts))


def _sums(weights: Tensor, owner: Tensor, candidates: int) -> Tensor:
    """[heads, queries, candidates] of weights [heads, queries, rows] whose owners are [rows]; nobody's are left out."""
    sums = weights.new_zeros(*weights.shape[:2], candidates + 1)
    return sums.index_add_(2, owner, weights)[..., :-1]


def _square_peaks(weights: Tensor, owner: Tensor, candidates: int) -> Tensor:
    """[candidates]: the square of each one's largest weight, as a mean over heads and queries; arguments as above."""
    peaks = weights.new_zeros(*weights.shape[:2], candidates + 1)
    peaks.scatter_reduce_(2, owner.expand_as(weights), weights, "amax")
    return peaks[..., :-1].square().mean(dim=(0, 1))


def _read(layers: list[tuple[Tensor, Tensor]]) -> Read:
    mass, squares = (torch.stack(side).mean(dim=0).cpu() for side in zip(*layers, strict=True))
    return Read(mass, squares.sqrt())
