"""Scores that need keys and values only, against small cases worked out by hand or written out again."""

import math

import pytest
import torch

from kvfoundry.errors import SpecError
from kvfoundry.method import Method


def compress(spec, key, value=None, query=None, mask=None):
    query = torch.zeros_like(key) if query is None else query
    return Method.parse(spec).compress(query, key, key if value is None else value, attention_mask=mask)


def kept(layer, row=0, head=0):
    return [p for p in layer.positions[row, head].tolist() if p >= 0]


def test_keydiff_drops_the_keys_along_the_mean():
    """Three keys along x and one along y: the mean points along x, so y stands out, then the scaled x is as x."""
    key = torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 0.0], [1.0, 0.1]])[None, None]
    assert kept(compress("keydiff(budget=1)", key)) == [1]
    # Cosines to the mean (2.995, 1.0995) / 4: row 3 is nearest, rows 0 and 2 tie and the earlier one stays.
    assert kept(compress("keydiff(budget=2)", key)) == [0, 1]


def test_keydiff_by_blocks_takes_the_mean_of_the_candidates():
    """Against a loop over blocks of three: candidates are the rows kept so far and the block."""
    torch.manual_seed(0)
    key = torch.randn(2, 2, 20, 4)
    layer = compress("keydiff(budget=5)+blocks(size=3)", key)
    for row in range(2):
        for head in range(2):
            unit = torch.nn.functional.normalize(key[row, head], dim=-1)
            stay = list(range(5))
            for start in range(5, 20, 3):
                candidates = stay + list(range(start, min(start + 3, 20)))
                away = unit[candidates] @ unit[candidates].mean(dim=0)
                stay = sorted(candidates[i] for i in away.argsort()[:5].tolist())
            assert kept(layer, row, head) == stay


def test_a_score_of_the_row_alone_does_not_depend_on_blocks():
    norms = torch.tensor([3.0, 1.0, 2.0, 4.0, 0.5, 6.0])[None, None, :, None]
    whole = compress("l2norm(budget=2, skip_layers=0)", norms)
    for size in (1, 2, 3, 100):
        blocks = compress(f"l2norm(budget=2, skip_layers=0)+blocks(size={size})", norms)
        assert kept(blocks) == kept(whole) == [1, 4]


def test_lagkv_by_hand():
    """Partitions of 2 behind no sink: 0-1 judged by the range of 2-3, 2-3 by that of 4-5, the rest stays first."""
    key = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 0.0], [2.0, 1.0], [0.0, 0.0], [1.0, 1.0], [9.0, 9.0]])[None, None]
    # Partition 0 in the range x 0..2, y 0..1: rows (0, 0) and (2, 0), deviations 0 and sqrt(2).
    # Partition 1 in the range x 0..1, y 0..1: rows (0, 0) and (2, 1), deviations 0 and sqrt(1/2).
    layer = compress("lagkv(budget=4, lag=2, sinks=0, ranking=overall)", key)
    assert kept(layer) == [1, 4, 5, 6]
    assert kept(compress("lagkv(budget=5, lag=2, sinks=0, ranking=overall)", key)) == [1, 3, 4, 5, 6]
    assert kept(compress("lagkv(budget=2, lag=2, sinks=0)", key)) == [5, 6]  # newest first when short
    assert kept(compress("lagkv(budget=3, lag=2, sinks=1)", key)) == [0, 5, 6]
    share = math.exp(2**0.5) / (1 + math.exp(2**0.5))
    from kvfoundry.selection.scores.lag_relative import LagRelative

    spread = LagRelative(0, 2)._spread(key, slice(0, 6))
    assert spread[0, 0, 0].tolist() == pytest.approx([1 - share, share])


def test_lagkv_survives_channels_that_do_not_vary():
    key = torch.ones(1, 1, 12, 4)
    layer = compress("lagkv(budget=5, lag=3, sinks=1)", key)
    assert len(kept(layer)) == 5 and kept(layer)[0] == 0


def test_chunks_stay_whole_and_are_the_same_in_every_head():
    """Norms summed over two heads, averaged in chunks of 2; l2norm keeps the smallest."""
    norms = torch.tensor([[1.0, 9.0, 2.0, 3.0, 4.0, 4.0, 0.5], [1.0, 9.0, 6.0, 1.0, 1.0, 1.0, 9.0]])[None, ..., None]
    # Chunk means of the sums: 10, 6, 5, 9.5.
    spec = "l2norm(budget={}, skip_layers=0)+chunks(size=2, rest={})"
    for budget, fill, drop in [(2, [4, 5], [4, 5]), (3, [2, 4, 5], [4, 5]), (4, [2, 3, 4, 5], [2, 3, 4, 5])]:
        for rest, wanted in (("fill", fill), ("drop", drop)):
            layer = compress(spec.format(budget, rest), norms)
            assert kept(layer) == kept(layer, head=1) == wanted
    # The last chunk holds one row only.
    assert kept(compress(spec.format(6, "drop"), norms)) == [2, 3, 4, 5, 6]
    # A protected row takes its chunk along, before any other.
    assert kept(compress(spec.format(4, "drop") + "+protect(sinks=1)", norms)) == [0, 1, 4, 5]
    # Shorter than a chunk: single rows, per head.
    layer = compress("l2norm(budget=2, skip_layers=0)+chunks(size=50)", norms)
    assert kept(layer) == [0, 6] and kept(layer, head=1) == [0, 3]


def test_rkv_drops_the_oldest_of_like_keys():
    """Keys a b a a c and a window of 1: the last a is never redundant, the middle one once, the first twice."""
    key = torch.eye(4)[[0, 1, 0, 0, 2, 3]][None, None]
    assert kept(compress("rkv(budget=5, window=1, kernel=1)", key)) == [1, 2, 3, 4, 5]
    assert kept(compress("rkv(budget=4, window=1, kernel=1)", key)) == [1, 3, 4, 5]


def test_rkv_redundancy_is_what_the_formula_says():
    from kvfoundry.selection.scores import redundancy

    torch.manual_seed(0)
    keys = torch.randn(2, 3, 11, 4)
    valid = torch.ones(2, 3, 11, dtype=torch.bool)
    score = redundancy.ImportanceMinusRedundancy(threshold=0.3)
    found = score._redundancy(keys, valid)
    for batch in range(2):
        for head in range(3):
            total = torch.zeros(11)
            for i in range(11):
                cosines = torch.nn.functional.cosine_similarity(keys[batch, head, i][None], keys[batch, head], dim=-1)
                cosines[i] = 0
                like = [j for j in range(11) if cosines[j] > 0.3]
                if like:
                    cosines[like[-1]] = 0
                total += cosines
            torch.testing.assert_close(found[batch, head], (total / 11).softmax(0))


def test_rkv_redundancy_comes_out_the_same_in_blocks(monkeypatch):
    from kvfoundry.selection.scores import redundancy

    torch.manual_seed(0)
    keys, valid = torch.randn(1, 2, 37, 8), torch.arange(37).expand(1, 2, -1) < torch.tensor([37, 30])[:, None]
    score = redundancy.ImportanceMinusRedundancy()
    whole = score._redundancy(keys, valid)
    monkeypatch.setattr(redundancy, "_BLOCK_ELEMENTS", 1)
    torch.testing.assert_close(score._redundancy(keys, valid), whole)
    assert float(whole[0, 1, 30:].abs().sum()) == 0.0


def test_rkv_acts_every_buffer_tokens():
    torch.manual_seed(0)
    rows = [torch.randn(1, 2, 30, 8) for _ in range(3)]
    layer = Method.parse("rkv(budget=16, window=4, buffer=5)").compress(*rows)
    lengths = []
    for _ in range(12):
        layer.step(*[torch.randn(1, 2, 1, 8) for _ in range(3)])
        lengths.append(int(layer.lengths[0, 0]))
    assert lengths == [17, 18, 19, 20, 16] * 2 + [17, 18]


def test_cur_by_hand():
    """Squared norms 1, 3 | 2, 2 in blocks of 2: shares 1/4, 3/4, 1/2, 1/2, squared for keys times values."""
    key = torch.tensor([1.0, 3.0, 2.0, 2.0]).sqrt()[None, None, :, None]
    assert kept(compress("cur(budget=1, sinks=0, block=2)", key)) == [1]
    assert kept(compress("cur(budget=3, sinks=0, block=2)", key)) == [1, 2, 3]
    assert kept(compress("cur(budget=2, sinks=1, block=2)", key)) == [0, 1]
    value = torch.tensor([9.0, 0.0, 1.0, 1.0])[None, None, :, None]
    assert kept(compress("cur(budget=1, sinks=0, block=None, leverage=value)", key, value)) == [0]


@pytest.mark.parametrize(
    "spec",
    [
        "lagkv(budget=8, lag=1)",
        "lagkv(budget=8, ranking=other)",
        "chunkkv(budget=64, chunk=0)",
        "chunkkv(budget=64)+chunks(size=4)",
        "chunkkv(budget=64)+adaptive_heads",
        "snapkv(budget=64)+chunks(rest=keep)",
        "criticalkv(budget=64, first=1.5)",
        "criticalkv(budget=64)+critical",
        "fullkv+critical",
        "keydiff(budget=8)+blocks(size=0)",
        "expected_attention(budget=8, future=0)",
        "expected_attention(budget=8, epsilon=-1)",
        "rkv(budget=64, weight=2)",
        "rkv(budget=64, buffer=0)",
        "kvzip(budget=64, scope=all)",
        "kvzip(budget=64)+schedule(every=4)",
        "kvzip(budget=64)+snapkv(budget=64)",
        "cur(budget=8, leverage=none)",
    ],
)
def test_impossible_recipes_are_refused(spec):
    with pytest.raises(SpecError):
        Method.parse(spec)


@pytest.mark.parametrize("spec", ["expected_attention(budget=8)", "snapkv(budget=40)+critical", "kvzip(budget=8)"])
def test_what_needs_the_model_refuses_tensors_before_any_compute(spec):
    with pytest.raises(SpecError, match="use it through KVCache"):
        Method.parse(spec).compress(None, None, None)
