"""scissorhands: rows that the history window seldom passed over."""

import pytest
import torch

from kvfoundry.errors import SpecError
from kvfoundry.method import Method
from kvfoundry.selection.scores.persistence import AboveAverage

from .merge_cases import evidence_of, rows_of


def test_counts_by_hand():
    """Two queries see three rows: weights (6, 3, 1) / 10 and (1, 8, 1) / 10, average 1/3."""
    logits = torch.tensor([[6.0, 3.0, 1.0], [1.0, 8.0, 1.0]]).log()
    rows = rows_of(torch.eye(3).tolist(), [[0.0]] * 3)
    evidence = evidence_of(rows)
    evidence = type(evidence)(
        **{
            **{name: getattr(evidence, name) for name in evidence.__dataclass_fields__},
            "window_query": logits[None, None],
            "window_positions": torch.tensor([[2, 2]]),
        }
    )
    below = torch.tensor([1.0, 1.0, 2.0])
    mean = torch.tensor([0.35, 0.55, 0.1])
    assert AboveAverage(2)(evidence)[0, 0].tolist() == pytest.approx((mean - below).tolist(), rel=1e-4)


def test_a_row_is_not_judged_by_queries_before_it():
    """The newest row: one query, its own, and it gives the row all of its attention or less than the average."""
    key = torch.zeros(1, 1, 6, 2)
    query = torch.zeros(1, 1, 6, 2)
    layer = Method.parse("scissorhands(budget=3, history=6, recent=1)").compress(query, key, key)
    # Every weight equals its query's average: nothing is below it, and the larger mean attention decides.
    assert layer.positions[0, 0].tolist() == [0, 1, 5]


@pytest.mark.parametrize("form", ["count", "sum"])
def test_new_tokens_do_not_starve(form):
    """B19: budget equal to the prompt, 60 steps."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda heads, tokens: torch.randn(1, heads, tokens, 8, generator=generator)  # noqa: E731
    method = Method.parse(f"scissorhands(budget=40, history=16, recent=10, form='{form}')")
    layer = method.compress(draw(4, 40), draw(2, 40), draw(2, 40))
    for step in range(60):
        layer.step(draw(4, 1), draw(2, 1), draw(2, 1))
        assert layer.lengths.tolist() == [[40, 40]]
        newest = torch.arange(41 + step - 10, 41 + step)
        assert bool((layer.positions[..., -10:] == newest).all())


def test_the_paper_s_stride_is_a_schedule():
    method = Method.parse("scissorhands(budget=40)+schedule(every=20, cap=20)")
    generator = torch.Generator().manual_seed(0)
    draw = lambda heads, tokens: torch.randn(1, heads, tokens, 8, generator=generator)  # noqa: E731
    layer = method.compress(draw(4, 60), draw(2, 60), draw(2, 60))
    assert layer.lengths.tolist() == [[40, 40]]
    for step in range(20):
        layer.step(draw(4, 1), draw(2, 1), draw(2, 1))
        assert int(layer.lengths.max()) == (41 + step if step < 19 else 20)


@pytest.mark.parametrize(
    "given", ["history=None", "history=0", "form='mean'", "decay=2.0", "selection='best'", "temperature=-1"]
)
def test_impossible_values_are_refused(given):
    with pytest.raises(SpecError):
        Method.parse(f"scissorhands(budget=64, {given})")
