"""Vectors in one byte a number, and fewer of them."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from kvfoundry.errors import MissingExtraError
from kvfoundry.rag import extra
from kvfoundry.rag.vectors.int8 import Rows
from kvfoundry.rag.vectors.token_pooling import pool_tokens


def unit(count: int, size: int = 32) -> torch.Tensor:
    return normalize(torch.randn(count, size), dim=1)


def test_int8_is_within_half_a_step_and_a_quarter_of_the_bytes() -> None:
    vectors = unit(50) * torch.logspace(-3, 2, 50)[:, None]
    rows, exact = Rows.of(vectors, rounded=True), Rows.of(vectors, rounded=False)
    step = vectors.abs().amax(1, keepdim=True) / 127
    assert ((rows.floats() - vectors).abs() <= step / 2 * 1.001).all()
    assert torch.equal(exact.floats(), vectors)
    assert rows.nbytes == 50 * (32 + 4) and exact.nbytes == 50 * 32 * 4


def test_a_row_of_zeros_stays_zeros() -> None:
    assert torch.equal(Rows.of(torch.zeros(2, 8), rounded=True).floats(), torch.zeros(2, 8))


@pytest.mark.parametrize("rounded", [True, False])
def test_products_are_those_of_the_stored_vectors(rounded: bool) -> None:
    rows, queries = Rows.of(unit(20), rounded), unit(3)
    torch.testing.assert_close(rows.products(queries), queries @ rows.floats().T)
    some = torch.tensor([4, 1, 1])
    torch.testing.assert_close(rows.take(some).floats(), rows.floats()[some])
    torch.testing.assert_close(Rows.joined([rows, rows]).floats(), rows.floats().repeat(2, 1))


def test_pooling_keeps_the_first_and_averages_what_is_alike() -> None:
    pytest.importorskip("sentence_transformers")
    groups = unit(4, 64)
    tokens = normalize(torch.cat([unit(1, 64), groups.repeat_interleave(3, 0) + 0.01 * torch.randn(12, 64)]), dim=1)
    pooled = pool_tokens(tokens, 3)
    assert pooled.shape == (5, 64)
    torch.testing.assert_close(pooled[0], tokens[0])
    torch.testing.assert_close(pooled.norm(dim=1), torch.ones(5))
    assert ((groups @ pooled[1:].T).amax(1) > 0.99).all(), "one vector is left for each group"
    assert pool_tokens(tokens, 1) is tokens


def test_pooling_without_the_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra, "is_installed", lambda module: False)
    with pytest.raises(MissingExtraError, match=r"pip install 'kvfoundry\[rag\]'"):
        pool_tokens(unit(6), 2)
