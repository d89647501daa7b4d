"""Scores and choice of pages, and attention over the chosen ones."""

from __future__ import annotations

import torch
from kernel_timing import (
    DEVICE,
    DIM,
    HEADS,
    QUERY_HEADS,
    SCALING,
    Board,
    Call,
    against_sdpa,
    cache_bytes,
    cold,
    counts,
    distance,
    random,
    sweep,
    timed,
)
from torch import Tensor

from kvfoundry.kernels.page_selection import fused as selection
from kvfoundry.kernels.page_selection import naive as selection_naive
from kvfoundry.kernels.paged_attention import fused as paged
from kvfoundry.kernels.paged_attention import naive as paged_naive
from kvfoundry.kernels.triton_support import Tuning


def run_quest(board: Board) -> None:
    """Page scores, selection, and attention over 4,096 rows."""
    page, budget = 16, 256
    query, keys, values = random(1, QUERY_HEADS, DIM), random(1, HEADS, 20000, DIM), random(1, HEADS, 20000, DIM)
    low, high = (keys.unflatten(2, (-1, page)).amin(3), keys.unflatten(2, (-1, page)).amax(3))
    lengths = torch.randint(5000, 20001, (1, HEADS), dtype=torch.int32, device=DEVICE)
    scores = selection_naive.page_scores(query, low, high, lengths, page=page, group="max")
    found = selection.page_scores(query, low, high, lengths, page=page, group="max")
    finite = scores.isfinite()
    right = board.gate(
        "quest scores", distance(found[finite], scores[finite]) + float((found[~finite] != scores[~finite]).sum())
    )
    ours, theirs = (
        module.best_pages(scores, lengths, page=page, budget=budget)[0] for module in (selection, selection_naive)
    )
    right &= board.gate("quest selection", float((ours != theirs).sum()), 0.0)
    starts = (torch.arange(HEADS, device=DEVICE) * 20000).view(1, HEADS)
    flat = (keys.flatten(0, 2), values.flatten(0, 2))
    real = torch.ones(1, dtype=torch.bool, device=DEVICE)
    wide = (query.float(), *(tensor.float() for tensor in flat))
    expected = paged_naive.attend(*wide, theirs, starts, lengths, page, real, scaling=SCALING)
    right &= board.gate(
        "quest attention",
        distance(paged.attend(query, *flat, theirs, starts, lengths, page, scaling=SCALING), expected),
    )
    if not right:
        return

    def calls(batch: int, rows: int, tuning: Tuning, parts: str = "both") -> list[Call]:
        def make() -> Call:
            query, keys, values = (
                random(batch, QUERY_HEADS, DIM),
                random(batch * HEADS * rows, DIM),
                random(batch * HEADS * rows, DIM),
            )
            low, high = random(batch, HEADS, rows // page, DIM), random(batch, HEADS, rows // page, DIM)
            lengths = counts(batch, rows)
            starts = (torch.arange(batch * HEADS, device=DEVICE) * rows).view(batch, HEADS)
            table, number = selection.select(query, low, high, lengths, page=page, budget=budget)
            scores = selection.page_scores(query, low, high, lengths, page=page, group="max")

            def attend(table: Tensor, number: Tensor) -> Tensor:
                return paged.attend(
                    query, keys, values, table, starts, lengths, page, scaling=SCALING, counts=number, tuning=tuning
                )

            whole: dict[str, Call] = {
                "scores": lambda: selection.page_scores(query, low, high, lengths, page=page, group="max"),
                "selection": lambda: selection.best_pages(scores, lengths, page=page, budget=budget),
                "attention": lambda: attend(table, number),
                "both": lambda: attend(*selection.select(query, low, high, lengths, page=page, budget=budget)),
            }
            return whole[parts]

        return cold(make, cache_bytes(batch, min(rows, page * budget)))[: 2 if batch * rows > 300000 else 8]

    def moved(batch: int, rows: int) -> int:
        return cache_bytes(batch, min(rows, page * budget))

    shapes = [paged.DEFAULT, Tuning(32, 4, 3, 2), Tuning(64, 4, 2, 4), Tuning(128, 4, 2, 2)]
    best = sweep(board, "quest attention", shapes, lambda b, r, t: calls(b, r, t, "attention"), moved)
    for batch, rows in ((1, 131072), (1, 32768), (8, 32768)):
        bounds = cache_bytes(batch, rows) // page
        for name, size in (
            ("scores", bounds),
            ("selection", 4 * batch * HEADS * rows // page),
            ("attention", moved(batch, rows)),
            ("both", bounds + moved(batch, rows)),
        ):
            seconds = timed(board, calls(batch, rows, best, name))
            board.figure(f"quest {name}", batch, rows, seconds, size, **against_sdpa(board, batch, rows, seconds))
