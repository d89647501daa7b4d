"""Fused paged attention and page selection equal their references; all pages chosen equals dense."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from near import assert_near

from kvfoundry.kernels.decode_attention import naive as decode
from kvfoundry.kernels.page_selection import naive as selection
from kvfoundry.kernels.paged_attention import naive as paged


def fused_selection() -> Any:
    from kvfoundry.kernels.page_selection import fused

    return fused


def fused_attention() -> Any:
    from kvfoundry.kernels.paged_attention import fused

    return fused


def bounds(keys: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = keys.unflatten(2, (-1, page))
    return whole.amin(dim=3), whole.amax(dim=3)


@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize(("dtype", "group"), [(torch.float32, 4), (torch.bfloat16, 1), (torch.float16, 3)])
def test_attention_over_chosen_pages(device: torch.device, page: int, dtype: torch.dtype, group: int) -> None:
    heads, capacity, dim = 2, 128, 64
    query = torch.randn(2, heads * group, dim, device=device, dtype=dtype)
    keys, values = (torch.randn(2 * heads * capacity, dim, device=device, dtype=dtype) for _ in range(2))
    starts = torch.arange(4, device=device).view(2, 2) * capacity
    lengths = torch.tensor([[70, 1], [128, 33]], device=device, dtype=torch.int32)
    pages = torch.tensor([[[0, 2, -1], [0, -1, -1]], [[1, 2, 3], [1, -1, -1]]], device=device, dtype=torch.int32)
    real = torch.ones(2, dtype=torch.bool, device=device)
    sinks = torch.randn(heads * group, device=device)
    arguments = (query, keys, values, pages, starts, lengths, page, real)
    for terms in (dict(scaling=0.1), dict(scaling=0.1, softcap=4.0, sinks=sinks)):
        wide = (tensor.float() for tensor in arguments[:3])
        expected = paged.attend(*wide, *arguments[3:], **terms)  # type: ignore[arg-type]
        assert_near(fused_attention().attend(*arguments, **terms), expected, dtype)


def test_every_page_is_everything(device: torch.device) -> None:
    query = torch.randn(1, 4, 64, device=device)
    keys, values = (torch.randn(1, 2, 96, 64, device=device) for _ in range(2))
    lengths = torch.tensor([[90, 17]], dtype=torch.int32, device=device)
    low, high = bounds(keys, 16)
    table, counts = fused_selection().select(query, low, high, lengths, page=16, budget=6)
    assert counts.tolist() == [[6, 2]]
    starts = torch.tensor([[0, 96]], device=device)
    found = fused_attention().attend(
        query, keys.flatten(0, 2), values.flatten(0, 2), table, starts, lengths, 16, counts=counts, scaling=0.1
    )
    dense = decode.attend(query[:, :, None], keys, values, lengths, scaling=0.1)
    assert_near(found, dense[:, :, 0], torch.float32)  # type: ignore[index]


@pytest.mark.parametrize("group", ["max", "mean", "sum"])
@pytest.mark.parametrize("budget", [1, 5, 40])
def test_selection(device: torch.device, group: Any, budget: int) -> None:
    query = torch.randn(2, 6, 80, device=device)
    keys = torch.randn(2, 2, 30 * 16, 80, device=device)
    lengths = torch.tensor([[470, 0], [1, 161]], dtype=torch.int32, device=device)
    low, high = bounds(keys, 16)
    scores = selection.page_scores(query, low, high, lengths, page=16, group=group)
    found = fused_selection().page_scores(query, low, high, lengths, page=16, group=group)
    assert_near(found, scores, torch.float32)
    for ours, theirs in zip(
        fused_selection().select(query, low, high, lengths, page=16, budget=budget, group=group),
        selection.select(query, low, high, lengths, page=16, budget=budget, group=group),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_ties_go_to_the_earlier_page(device: torch.device) -> None:
    scores = torch.randint(-2, 3, (3, 2, 50), device=device).float()
    scores[0, 0, 3] = -0.0
    scores[1] *= 1e-30
    lengths = torch.tensor([[800, 799], [400, 16], [33, 640]], dtype=torch.int32, device=device)
    masked = scores.masked_fill(torch.arange(50, device=device) >= -(-lengths // 16)[..., None], -torch.inf)
    for budget in (1, 2, 7, 30):
        ours = fused_selection().best_pages(masked, lengths, page=16, budget=budget)
        theirs = selection.best_pages(masked, lengths, page=16, budget=budget)
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("pages", [9, 600, 2500])
def test_any_scores_are_told_apart(device: torch.device, pages: int) -> None:
    """Infinite ones, zeros of both signs, numbers that differ in their last bit, and rooms of any number of chunks."""
    scores = torch.randn(2, 2, pages, device=device)
    ones = torch.ones(pages, device=device).view(torch.int32)
    scores[0, 0] = (ones + torch.randperm(pages, device=device).int()).view(torch.float32)
    scores[0, 1, ::2] = torch.inf
    scores[1, 0, ::3] = -torch.inf
    scores[1, 0, 5:] = -torch.inf
    scores[1, 1] = torch.where(torch.arange(pages, device=device) % 2 == 0, 0.0, -0.0)
    lengths = torch.full((2, 2), pages * 16 - 3, dtype=torch.int32, device=device)
    lengths[1, 0] = 5 * 16
    for budget in (1, 4, pages // 2 + 2, pages):
        ours = fused_selection().best_pages(scores, lengths, page=16, budget=budget)
        theirs = selection.best_pages(scores, lengths, page=16, budget=budget)
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("new", [1, 5])
def test_bounds_follow_new_rows(device: torch.device, new: int) -> None:
    keys = torch.randn(2, 2, 48, 80, device=device)
    lengths = torch.tensor([[33, 16], [48, new]], dtype=torch.int32, device=device)
    found, expected = ([torch.full((2, 2, 3, 80), 9.0, device=device) for _ in range(2)] for _ in range(2))
    for start in range(0, 48, 16):  # the rows that were there before
        for bounds_of, reduce in zip((*found, *expected), (torch.amin, torch.amax) * 2, strict=True):
            inside = torch.arange(start, start + 16, device=device) < (lengths - new)[..., None]
            neutral = torch.inf if reduce is torch.amin else -torch.inf
            block = keys[:, :, start : start + 16].masked_fill(~inside[..., None], neutral)
            bounds_of[:, :, start // 16] = reduce(block, dim=2)
    newest = torch.stack(
        [torch.stack([keys[b, h, lengths[b, h] - new : lengths[b, h]] for h in (0, 1)]) for b in (0, 1)]
    )
    fused_selection().extend_bounds(*found, newest, lengths, page=16)
    selection.extend_bounds(*expected, newest, lengths, page=16)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    whole = keys[0, 0, :33].tensor_split([16, 32])
    assert torch.equal(found[0][0, 0], torch.stack([rows.amin(dim=0) for rows in whole]))
