"""The contract that every layout answers, against rows in plain Python lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfoundry.kernels.attention import naive
from kvfoundry.layouts import DenseRows, RaggedRows, keep_rows
from kvfoundry.layouts.base import Layout, Reading, RowsView

LAYOUTS = [DenseRows, RaggedRows]
HEADS, DIM = 2, 4


class PlainRows:
    """rows[batch][head] is a list of (key, value, position, statistic)."""

    def __init__(self, rows: list[list[list[tuple[Tensor, Tensor, int, float]]]]):
        self.rows = rows

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor | None) -> None:
        for b, row in enumerate(self.rows):
            for t in range(keys.shape[2] if counts is None else int(counts[b])):
                for h, head in enumerate(row):
                    head.append((keys[b, h, t], values[b, h, t], int(positions[b, t]), 0.0))

    def truncated(self, lengths: Tensor) -> PlainRows:
        return PlainRows(
            [[head[: int(lengths[b, h])] for h, head in enumerate(row)] for b, row in enumerate(self.rows)]
        )

    def selected(self, indices: list[int]) -> PlainRows:
        return PlainRows([[list(head) for head in self.rows[i]] for i in indices])

    def copy(self) -> PlainRows:
        return self.selected(list(range(len(self.rows))))

    def check(self, layout: Layout) -> None:
        """Same rows, nothing behind them."""
        view = layout.view()
        lengths = [[len(head) for head in row] for row in self.rows]
        assert layout.lengths.tolist() == view.lengths.tolist() == lengths
        width = max(max(row) for row in lengths)
        assert view.keys.shape[2] == view.values.shape[2] == view.positions.shape[2] == width
        statistic = view.columns.get("statistic")
        for b, row in enumerate(self.rows):
            for h, head in enumerate(row):
                n = len(head)
                if n:
                    assert torch.equal(view.keys[b, h, :n], torch.stack([key for key, *_ in head]))
                    assert torch.equal(view.values[b, h, :n], torch.stack([value for _, value, *_ in head]))
                assert view.head_positions[b, h].tolist() == [p for *_, p, _ in head] + [-1] * (width - n)
                assert view.valid[b, h].tolist() == [True] * n + [False] * (width - n)
                assert not view.keys[b, h, n:].any() and not view.values[b, h, n:].any()
                if statistic is not None:
                    assert statistic[b, h].tolist() == [s for *_, s in head] + [0.0] * (width - n)


def numbers(batch: int, tokens: int, start: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, HEADS, tokens, DIM, generator=generator)
    positions = torch.tensor(start)[:, None] + torch.arange(tokens)
    return keys, keys.flip(-1) + 1, positions


def ragged_pair(layout: type, lengths: list[list[int]], seed: int = 0) -> tuple[Any, PlainRows]:
    """A layout that keeps the newest `lengths` rows of 9 per head, with a statistic per row, and its plain twin."""
    batch = len(lengths)
    keys, values, positions = numbers(batch, 9, [0] * batch, seed)
    statistic = torch.rand(batch, HEADS, 9, generator=torch.Generator().manual_seed(seed))
    whole = RowsView(
        keys, values, positions[:, None].to(torch.int16), torch.full((batch, HEADS), 9), {"statistic": statistic}
    )
    counts = torch.tensor(lengths)
    slots = torch.full((batch, HEADS, int(counts.max())), -1)
    plain: list[list[list[tuple[Tensor, Tensor, int, float]]]] = []
    for b in range(batch):
        plain.append([])
        for h in range(HEADS):
            kept = list(range(9 - lengths[b][h], 9))
            slots[b, h, : len(kept)] = torch.tensor(kept, dtype=torch.long)
            plain[b].append([(keys[b, h, i], values[b, h, i], i, float(statistic[b, h, i])) for i in kept])
    return layout.gathered(whole, slots, counts), PlainRows(plain)


lengths_of = st.lists(st.lists(st.integers(1, 9), min_size=HEADS, max_size=HEADS), min_size=1, max_size=3)
actions = st.lists(st.sampled_from(["append", "append some", "truncate", "select", "fork"]), max_size=6)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=80, deadline=None)
@given(lengths=lengths_of, todo=actions, seed=st.integers(0, 999))
def test_any_sequence_of_operations_equals_plain_lists(layout, lengths, todo, seed):
    rows, plain = ragged_pair(layout, lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    others: list[tuple[Layout, PlainRows]] = []
    seen = [9] * len(lengths)
    for i, action in enumerate(todo):
        batch = len(plain.rows)
        if action.startswith("append"):
            counts = None if action == "append" else torch.randint(0, 4, (batch,), generator=generator)
            keys, values, positions = numbers(batch, 3, seen, seed + i)
            if counts is not None:
                positions = positions.masked_fill(torch.arange(3) >= counts[:, None], -1)
            rows = rows.append(keys, values, positions, counts, max(seen) + 2)
            plain.append(keys, values, positions, counts)
            seen = [s + (3 if counts is None else int(counts[b])) for b, s in enumerate(seen)]
        elif action == "truncate":
            less = torch.tensor([[max(0, len(head) - 1 - h) for h, head in enumerate(row)] for row in plain.rows])
            rows, plain = rows.truncated(less), plain.truncated(less)
        elif action == "select":
            chosen = torch.randint(0, batch, (2,), generator=generator)
            rows, plain = rows.select_batch(chosen), plain.selected(chosen.tolist())
            seen = [seen[b] for b in chosen.tolist()]
        else:
            others.append((rows.shared(), plain.copy()))
        plain.check(rows)
    for other, expected in others:  # what happened since did not reach them
        expected.check(other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shared_layout_copies_at_the_first_write_of_either_side(layout):
    first, plain = ragged_pair(layout, [[5, 5], [5, 5]])
    second, other = first.shared(), plain.copy()
    assert {t.data_ptr() for t in first.tensors()} >= {next(iter(second.tensors())).data_ptr()}
    for rows, expected, seed in ((first, plain, 1), (second, other, 2)):
        keys, values, positions = numbers(2, 2, [9, 9], seed)
        rows.append(keys, values, positions, None, 10)
        expected.append(keys, values, positions, None)
    plain.check(first)
    other.check(second)
    third = second.shared()
    moved = torch.full((2, HEADS, 2, DIM), 7.0)
    third = third.with_first_keys(moved)
    other.check(second)
    assert torch.equal(third.view().keys[:, :, :2], moved)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_are_replaced_and_removed(layout):
    rows, _ = ragged_pair(layout, [[5, 3], [4, 5]])
    before = sum(tensor.untyped_storage().nbytes() for tensor in rows.tensors())
    view = rows.view()
    fresh = {"other": torch.where(view.valid[..., None], torch.rand(2, HEADS, 5, 4), 0.0)}
    rows = rows.with_columns(fresh)
    assert set(rows.view().columns) == {"other"} and torch.equal(rows.view().columns["other"], fresh["other"])
    rows = rows.with_columns({})
    assert not rows.view().columns
    assert sum(tensor.untyped_storage().nbytes() for tensor in rows.tensors()) < before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_expanded_heads_repeat_every_head(layout):
    rows, plain = ragged_pair(layout, [[5, 3], [4, 5]])
    expanded = rows.expanded_heads(3)
    assert expanded.lengths.tolist() == [[5, 5, 5, 3, 3, 3], [4, 4, 4, 5, 5, 5]]
    PlainRows([[list(head) for head in row for _ in range(3)] for row in plain.rows]).check(expanded)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_beyond_two_bytes(layout):
    """Positions are stored in two bytes until one needs more; old ones keep their values."""
    rows, plain = ragged_pair(layout, [[5, 3]])
    small = rows.view().positions.dtype
    assert small == torch.int16
    keys, values, _ = numbers(1, 3, [0], 1)
    positions = torch.tensor([[32766, 32767, 32768]])
    rows = rows.append(keys, values, positions, None, 32768)
    plain.append(keys, values, positions, None)
    plain.check(rows)
    assert rows.view().positions.dtype == torch.int32


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("queries", [1, 3])
def test_reading_equals_attention_per_head(layout, queries):
    """Heads of unequal lengths: each query head attends to the rows of its KV head, and to nothing else."""
    rows, plain = ragged_pair(layout, [[5, 3], [9, 1]])
    keys, values, positions = numbers(2, queries, [9, 9], 5)
    rows = rows.append(keys, values, positions, None, 9 + queries)
    plain.append(keys, values, positions, None)
    query = torch.randn(2, 4, queries, DIM, generator=torch.Generator().manual_seed(6))
    found = rows.attend(query, positions, Reading(naive.attend, 0.5))
    for b in range(2):
        for h in range(4):
            head = plain.rows[b][h // 2]
            key, value = torch.stack([k for k, *_ in head]), torch.stack([v for _, v, *_ in head])
            for q in range(queries):
                seen = torch.tensor([p <= 9 + q for *_, p, _ in head])
                weights = (query[b, h, q] @ key.T * 0.5).masked_fill(~seen, -torch.inf).softmax(-1)
                assert torch.allclose(found[b, h, q], weights @ value, atol=1e-5)


def test_unequal_heads_are_stored_raggedly_and_equal_ones_as_a_rectangle():
    """Bytes follow the rows that are kept, not the longest head."""
    view = ragged_pair(DenseRows, [[9, 9]])[0].view()
    slots = torch.tensor([[list(range(9)), [0] + [-1] * 8]])
    uneven = keep_rows(view, slots, torch.tensor([[9, 1]]))
    even = keep_rows(view, slots[:, :1].expand(-1, 2, -1), torch.tensor([[9, 9]]))
    assert isinstance(uneven, RaggedRows) and isinstance(even, DenseRows)
    held = [sum(t.untyped_storage().nbytes() for t in rows.tensors()) for rows in (uneven, even)]
    assert held[0] * 18 == held[1] * 10


def test_the_first_rows_leave_their_padding_behind():
    keys, values, positions = numbers(2, 4, [0, 0], 0)
    counts = torch.tensor([4, 2])
    positions = positions.masked_fill(torch.arange(4) >= counts[:, None], -1)
    rows, plain = DenseRows.of_tokens(keys, values, positions, counts, 3), PlainRows([[[], []], [[], []]])
    plain.append(keys, values, positions, counts)
    plain.check(rows)


def test_a_view_of_a_larger_storage_is_not_kept_alive():
    wide = torch.randn(1, HEADS, 4, 3 * DIM)
    rows = DenseRows.of_tokens(wide[..., :DIM], wide[..., DIM : 2 * DIM], torch.arange(4)[None], None, 3)
    for tensor in rows.tensors():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
