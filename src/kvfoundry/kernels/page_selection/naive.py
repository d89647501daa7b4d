"""Reference page selection: bound every page, always the one being filled, then the best of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Group = Literal["max", "mean", "sum"]


def page_limits(query: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The most that q.k can be on every page: sum over channels of max(q low, q high), without scaling.

    query: [batch, query_heads, head_dim]; low, high: [batch, heads, pages, head_dim]. Returns float32 [batch, heads,
    query heads of each, pages].
    """
    grouped = query.float().unflatten(1, (low.shape[1], -1))
    above, below = (bounds.float().transpose(-1, -2) for bounds in (high, low))
    return grouped.clamp(min=0) @ above + grouped.clamp(max=0) @ below


def page_scores(query: Tensor, low: Tensor, high: Tensor, lengths: Tensor, *, page: int, group: Group) -> Tensor:
    """What every page promises: [batch, heads, room] float32; inf for the last page, -inf where there is none.

    A page promises sum over channels of max(q low, q high); the query heads of a stored head agree by `group`.
    query: [batch, query_heads, head_dim]; low, high: [batch, heads, room, head_dim], bounds of the keys of every page
    that is whole (the last one may hold anything). lengths: [batch, heads] rows; page: rows of a page.
    """
    limits = page_limits(query, low, high)
    agree: dict[Group, Callable[..., Tensor]] = {"max": limits.amax, "mean": limits.mean, "sum": limits.sum}
    scores = agree[group](dim=2)
    number = torch.arange(low.shape[2], device=query.device)
    counts = -(-lengths // page)[..., None]
    return scores.masked_fill(number == counts - 1, torch.inf).masked_fill(number >= counts, -torch.inf)


def best_pages(scores: Tensor, lengths: Tensor, *, page: int, budget: int) -> tuple[Tensor, Tensor]:
    """The `budget` pages with the highest scores, ties to the earlier page.

    Returns a table [batch, heads, budget] int32, ascending with -1 behind, and how many entries each head has, int32.
    """
    counts = (-(-lengths // page)).clamp(max=budget)
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :budget]
    if order.shape[2] < budget:
        order = torch.nn.functional.pad(order, (0, budget - order.shape[2]))
    number = torch.arange(budget, device=scores.device)
    beyond = scores.shape[2]
    table = order.masked_fill(number >= counts[..., None], beyond).sort(dim=-1).values
    return table.masked_fill(table == beyond, -1).int(), counts.int()


def select(
    query: Tensor, low: Tensor, high: Tensor, lengths: Tensor, *, page: int, budget: int, group: Group = "max"
) -> tuple[Tensor, Tensor]:
    """Table and counts of `best_pages` by `page_scores`: `budget` pages, the last one of a head always among them."""
    scores = page_scores(query, low, high, lengths, page=page, group=group)
    return best_pages(scores, lengths, page=page, budget=budget)


def extend_bounds(low: Tensor, high: Tensor, keys: Tensor, lengths: Tensor, *, page: int) -> None:
    """Take the newest keys [batch, heads, new, head_dim] into the bounds [batch, heads, room, head_dim] of their pages.

    lengths: [batch, heads] rows, the new ones included. A page that a new row begins forgets what stood there.
    """
    new = keys.shape[2]
    for i in range(new):
        row = (lengths - new + i).long()
        at = (row // page)[..., None, None].expand(-1, -1, 1, keys.shape[3])
        key, first = keys[:, :, i : i + 1], (row % page == 0)[..., None, None]
        low.scatter_(2, at, torch.where(first, key, torch.minimum(low.gather(2, at), key)))
        high.scatter_(2, at, torch.where(first, key, torch.maximum(high.gather(2, at), key)))
