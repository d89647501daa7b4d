"""Pages of rows: bounds of their keys, what they promise a query, and which of them to read (Quest). Pure functions.

A page is `page` rows that are stored one after the other in one head; the last page of a head may be partly filled.
Tables of pages (or slots) are ascending numbers with -1 behind the last one of a head that reads fewer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfoundry.kernels.page_selection.naive import page_limits
from kvfoundry.layouts.base import Slots


def page_bounds(keys: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest key per channel of every page: [..., pages, head_dim] each.

    keys: [..., rows, head_dim], all of them real. A partly filled last page is bounded by the rows it has.
    """
    rows = keys.shape[-2]
    whole = keys[..., : rows // page * page, :].unflatten(-2, (-1, page))
    low, high = whole.amin(dim=-2), whole.amax(dim=-2)
    if rows % page == 0:
        return low, high
    rest = keys[..., rows // page * page :, :]
    return (
        torch.cat([low, rest.amin(dim=-2, keepdim=True)], dim=-2),
        torch.cat([high, rest.amax(dim=-2, keepdim=True)], dim=-2),
    )


def page_scores(query: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The most that q.k can be on every page: sum over channels of max(q low, q high), without scaling; float32.

    query: [batch, query_heads, head_dim]; low, high: [batch, heads, pages, head_dim], heads divides query_heads.
    Returns [batch, query_heads, pages].
    """
    return page_limits(query, low, high).flatten(1, 2)


def best_pages(scores: Tensor, counts: Tensor, budget: Tensor) -> Tensor:
    """The `budget` pages with the highest scores, ties to the earlier page: a table [batch, heads, widest].

    scores: [batch, heads, pages]; counts: [batch, heads] pages that exist; budget: [batch, heads or 1].
    """
    number = torch.arange(scores.shape[-1], device=scores.device)
    order = scores.masked_fill(number >= counts[..., None], -torch.inf).argsort(dim=-1, descending=True, stable=True)
    taken = torch.minimum(budget.expand_as(counts), counts)
    width = int(taken.max()) if taken.numel() else 0
    return _ascending(order[..., :width], number[:width] < taken[..., None])


def evaluation_pages(scores: Tensor, counts: Tensor, budget: Tensor) -> Tensor:
    """The rule of Quest's evaluation code: all pages compete, and at least 3 are read. Arguments of `best_pages`."""
    return best_pages(scores, counts, budget.clamp(min=3))


def kernel_pages(scores: Tensor, counts: Tensor, budget: Tensor) -> Tensor:
    """The rule of Quest's kernels: the last page, the one being filled, is always read, and at least one other."""
    number = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill(number == counts[..., None] - 1, torch.inf)
    return best_pages(scores, counts, budget.clamp(min=2))


def factory_tokens(
    scores: Tensor, lengths: Tensor, budget: Tensor, *, page: int, recent: int, prefix_pages: Tensor | None = None
) -> Tensor:
    """KVCache-Factory's rule: the newest `recent` rows and exactly as many others as the budget leaves: a slot table.

    Pages tile the rows before the recent ones. The best ceil(left / page) are taken, one more when the last of these
    pages is partly filled and not all are taken; their rows in ascending order are cut to what is left, so the surplus
    goes at the newest end, not in the worst page.
    scores: [batch, heads, pages] of the pages before the recent rows; lengths: [batch, heads] rows; budget: [batch,
    heads or 1] rows.
    """
    budget = torch.minimum(budget.expand_as(lengths), lengths)
    newest = budget.clamp(max=recent)
    prefix, left = lengths - newest, budget - newest
    counts = -(-prefix // page)
    wanted = -(-left // page)
    wanted = wanted + ((prefix % page > 0) & (wanted < counts) & (left > 0))
    pages = best_pages(scores, counts, torch.where(left >= prefix, counts, wanted))
    slots = (pages[..., None] * page + torch.arange(page, device=scores.device)).flatten(-2)
    inside = (pages >= 0).repeat_interleave(page, dim=-1) & (slots < prefix[..., None])
    slots = _ascending(slots, inside & (inside.cumsum(dim=-1) <= left[..., None]))
    offset = torch.arange(int(newest.max()) if newest.numel() else 0, device=scores.device)
    tail = prefix[..., None] + offset
    slots, tail_in = torch.cat([slots, tail], dim=-1), offset < newest[..., None]
    present = torch.cat([slots[..., : slots.shape[-1] - offset.numel()] >= 0, tail_in], dim=-1)
    return _ascending(slots, present)[..., : int(budget.max()) if budget.numel() else 0]


def _ascending(numbers: Tensor, present: Tensor) -> Tensor:
    """The present numbers in ascending order, -1 behind them."""
    beyond = torch.iinfo(numbers.dtype).max
    ordered = numbers.masked_fill(~present, beyond).sort(dim=-1).values
    return ordered.masked_fill(ordered == beyond, -1)


def last_page_bounds(keys: Slots, starts: Tensor, lengths: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Bounds of the last, partly filled page of every head: [batch, heads, 1, head_dim] each, 0 where there is none.

    keys: [slots, head_dim], of which a head owns `lengths` from `starts` on: [batch, heads].
    """
    first = lengths // page * page
    offset = first[..., None] + torch.arange(page, device=keys.device)
    inside = (offset < lengths[..., None])[..., None]
    rows = keys[torch.where(inside[..., 0], starts[..., None] + offset, 0)]
    low = rows.masked_fill(~inside, torch.inf).amin(dim=2, keepdim=True)
    high = rows.masked_fill(~inside, -torch.inf).amax(dim=2, keepdim=True)
    partial = (lengths % page > 0)[..., None, None]
    return low.masked_fill(~partial, 0.0), high.masked_fill(~partial, 0.0)


def with_last_page(bounds: Tensor, last: Tensor, counts: Tensor) -> Tensor:
    """Bounds of whole pages with those of the partly filled one put at page number `counts` [batch, heads]."""
    wide = F.pad(bounds, (0, 0, 0, 1))
    index = counts.clamp(max=wide.shape[2] - 1)[..., None, None].expand_as(last)
    return wide.scatter(2, index, last)
