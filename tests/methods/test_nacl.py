"""nacl: proxies rank, a part of the rest is drawn by lot."""

import pytest
import torch

from kvfoundry.errors import SpecError
from kvfoundry.method import Method
from kvfoundry.selection.choose import TopThenSampled
from kvfoundry.selection.draws import GivenDraws, HashedDraws

from .merge_cases import evidence_of, rows_of

COUNT = 8


def chosen(sampled, uniform=None, *, keep=4, temperature=1.0, scores=None, protected=()):
    rows = rows_of([[0.0]] * COUNT, [[0.0]] * COUNT)
    draws = HashedDraws() if uniform is None else GivenDraws((torch.tensor([[uniform]]),))
    scores = torch.arange(COUNT, 0, -1).float() if scores is None else torch.tensor(scores)
    mask = torch.zeros(1, 1, COUNT, dtype=torch.bool)
    mask[..., list(protected)] = True
    choice = TopThenSampled(sampled, temperature, draws)
    return choice(scores[None, None], evidence_of(rows), torch.tensor([[keep]]), mask)[0, 0].tolist()


def test_the_best_first_then_the_drawn():
    uniform = [0.1] * COUNT
    uniform[6] = 0.999
    assert chosen(1, uniform, temperature=0.0) == [0, 1, 2, 6]
    assert chosen(0, uniform) == [0, 1, 2, 3]
    assert chosen(0.25, uniform, temperature=0.0) == [0, 1, 2, 6]


def test_protection_is_outside_the_lot():
    uniform = [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.1]
    assert 7 in chosen(4, uniform, protected=(7,))
    assert chosen(9, uniform, keep=2, protected=(6, 7)) == [6, 7]


def test_rows_are_drawn_with_the_weight_of_their_score():
    """Frequencies over 4000 seeds against softmax(score): one row of two, scores 0 and log 3."""
    rows = rows_of([[0.0]] * 2, [[0.0]] * 2)
    scores = torch.tensor([[[0.0, float(torch.log(torch.tensor(3.0)))]]])
    nothing = torch.zeros(1, 1, 2, dtype=torch.bool)
    won = [
        TopThenSampled(1, 1.0, HashedDraws(seed))(scores, evidence_of(rows), torch.tensor([[1]]), nothing).item()
        for seed in range(4000)
    ]
    assert sum(won) / len(won) == pytest.approx(0.75, abs=0.03)


def test_another_seed_draws_other_rows():
    query, key, value = (
        torch.randn(1, heads, 200, 8, generator=torch.Generator().manual_seed(1)) for heads in (4, 2, 2)
    )
    kept = [
        Method.parse(f"nacl(budget=60, proxies=8, random=0.5, seed={seed})").compress(query, key, value).positions
        for seed in (0, 0, 1)
    ]
    assert torch.equal(kept[0], kept[1]) and not torch.equal(kept[0], kept[2])
    assert bool((kept[0][..., :4] == torch.arange(4)).all()) and bool(
        (kept[0][..., -8:] == torch.arange(192, 200)).all()
    )


@pytest.mark.parametrize("given", ["proxies=0", "random=1.5", "random=-1", "temperature=-1", "temperature=nan"])
def test_impossible_values_are_refused(given):
    with pytest.raises(SpecError):
        Method.parse(f"nacl(budget=64, {given})")
