"""GEAR: what its parts save and cost."""

from __future__ import annotations

import pytest
import torch

from kvfoundry.errors import SpecError
from kvfoundry.method import Method

from .support import feed, parts, rows_of


def _loss(layer, rows):
    return [
        float((ours - exact).norm() / exact.norm())
        for ours, exact in zip((layer.keys, layer.values), rows[1:], strict=True)
    ]


def test_every_step_of_64_is_smaller_than_16_bits():
    """B43: keys along channels, values along tokens, and less error than the plain base."""
    rows = rows_of(1, 256 + 64, 128, dtype=torch.bfloat16)
    layer = feed("gear(bits=4)", [t[:, :, :256] for t in rows], [256])
    for at in range(256, 256 + 64):
        layer.step(*[t[:, :, at : at + 1] for t in rows])
        assert layer.nbytes < 2 * 2 * (at + 1) * 128 * 2
        assert int(layer.rows.full_rows.max()) < 64
    found = parts(layer)
    assert found["keys.tables.scale"].shape == (2 * 5, 128) and "keys.rows.scale" not in found
    assert found["values.rows.scale"].shape == (2 * 320, 2) and "values.tables.scale" not in found
    exact = [tensor.float() for tensor in rows]
    for bits in (2, 4):
        ours = _loss(feed(f"gear(bits={bits})", exact, [320]), exact)
        plain = _loss(feed(f"gear(bits={bits}, rank=0, outlier_ratio=0)", exact, [320]), exact)
        kivi = _loss(feed(f"kivi(bits={bits}, group=64, residual=0)", exact, [320]), exact)
        assert max(ours) < 0.9 * min(plain) and max(ours) < 0.9 * min(kivi)


def test_rank_and_outliers_each_lower_the_error():
    rows = rows_of(1, 128, 64)
    rows = (rows[0], rows[1] + 3 * torch.randn(1, 2, 128, 2) @ torch.randn(1, 2, 2, 64), rows[2])
    rows[1][0, :, ::17, ::13] *= 9

    def loss(**options):
        written = ", ".join(f"{name}={value}" for name, value in options.items())
        return _loss(feed(f"gear(bits=2, {written})", rows, [128]), rows)

    plain, ranked = loss(rank=0, outlier_ratio=0), loss(rank=4, outlier_ratio=0)
    exact, both = loss(rank=0, outlier_ratio=0.05), loss(rank=4, outlier_ratio=0.05)
    for smaller, larger in ((ranked, plain), (exact, plain), (both, exact), (both, ranked)):
        assert all(a < b for a, b in zip(smaller, larger, strict=True))


def test_outliers_come_back_exactly_without_a_residual():
    rows = rows_of(1, 64, 32)
    rows[1][0, 1, 7, 3], rows[2][0, 0, 20, 30] = 77.0, -55.0
    layer = feed("gear(bits=2, rank=0, outlier_ratio=0.05)", rows, [64])
    assert layer.keys[0, 1, 7, 3] == 77.0 and layer.values[0, 0, 20, 30] == -55.0
    assert float((layer.keys[0, 1, :, 3] - rows[1][0, 1, :, 3]).abs().max()) < 1.5  # the channel is not spoiled


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("gear(bits=5)", "bits must be 2, 3, 4 or 8"),
        ("gear(block=300)", "at most 256"),
        ("gear(rank=-1)", "rank"),
        ("gear(outlier_ratio=0.7)", "outlier_ratio"),
        ("gear(loops=0)", "loops"),
    ],
)
def test_bad_parameters_are_refused(spec, words):
    with pytest.raises(SpecError, match=words):
        Method.parse(spec)


def test_a_rank_above_the_head_size_is_refused_before_the_first_token():
    with pytest.raises(SpecError, match="rank=40"):
        feed("gear(rank=40)", rows_of(1, 64, 32), [64])
