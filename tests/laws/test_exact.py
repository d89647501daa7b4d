"""Law 1: with nothing dropped, logits equal the model's own eager attention, however the tokens arrive."""

import pytest
import torch
from tiny_models import FAMILIES, left_padded, random_ids
from transformers import DynamicCache

import kvfoundry

from .support import forward_pieces, greedy

PROMPT, TOTAL = 40, 50
# Prompt at once, in even pieces, in pieces shorter than the padding, token by token; decode of one and of several.
PIECES = {
    "at once": [40, 1, 1, 1, 5, 2],
    "chunks": [16, 16, 8, 1, 4, 5],
    "small chunks": [7, 7, 7, 7, 7, 7, 7, 1],
    "one by one": [1] * 50,
}
BACKENDS = ["eager", "sdpa"]


def assert_equal_logits(found: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Within 1e-4 wherever there is a real token."""
    difference = (found - expected).abs().amax(dim=-1)
    if mask is not None:
        difference = difference * mask
    assert float(difference.max()) < 1e-4


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_full_cache_equals_eager(family, backend, pieces, own_model, reference_model):
    ids = random_ids(2, TOTAL)
    expected = forward_pieces(reference_model(family), None, ids, [TOTAL])
    model = own_model(family)
    kvfoundry.attach(model, attn_implementation=backend)
    for mask in (None, torch.ones_like(ids)):
        found = forward_pieces(model, kvfoundry.KVCache(model), ids, PIECES[pieces], mask)
        assert_equal_logits(found, expected, None)


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_full_cache_equals_eager_when_padded(family, backend, pieces, own_model, reference_model):
    ids, mask = left_padded([TOTAL, TOTAL - 13, TOTAL - 36])
    expected = forward_pieces(reference_model(family), None, ids, [TOTAL], mask)
    model = own_model(family)
    kvfoundry.attach(model, attn_implementation=backend)
    found = forward_pieces(model, kvfoundry.KVCache(model), ids, PIECES[pieces], mask)
    assert_equal_logits(found, expected, mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_generate_gives_the_same_greedy_tokens(family, tiny_model, reference_model):
    ids, mask = left_padded([PROMPT, PROMPT - 13])
    expected = greedy(reference_model(family), None, ids, mask, steps=24)
    model = tiny_model(family)
    assert torch.equal(greedy(model, kvfoundry.KVCache(model), ids, mask, steps=24), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_transformers_cache_works_under_our_attention(family, backend, own_model, reference_model):
    ids, mask = left_padded([TOTAL, TOTAL - 13])
    expected = forward_pieces(reference_model(family), None, ids, [TOTAL], mask)
    model = own_model(family)
    kvfoundry.attach(model, attn_implementation=backend)
    without = forward_pieces(model, None, ids, [TOTAL], mask)
    assert_equal_logits(without, expected, mask)
    plain = forward_pieces(model, DynamicCache(config=model.config), ids, PIECES["at once"], mask)
    assert_equal_logits(plain, expected, mask)
    unmasked = forward_pieces(model, DynamicCache(config=model.config), ids[:1], PIECES["at once"])
    assert_equal_logits(unmasked, expected[:1], None)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_a_method_whose_budget_is_never_reached_is_exact(family, tiny_model, reference_model):
    """B05, the kind: nothing approximate may act where everything fits."""
    ids = random_ids(2, TOTAL)
    expected = forward_pieces(reference_model(family), None, ids, [TOTAL])
    model = tiny_model(family)
    for spec in ("snapkv(budget=64, window=8)", "h2o(budget=1.0, window=8)", "streamingllm(budget=50)"):
        found = forward_pieces(model, kvfoundry.KVCache(model, spec), ids[:, :PROMPT], [PROMPT])
        assert_equal_logits(found, expected[:, :PROMPT], None)
