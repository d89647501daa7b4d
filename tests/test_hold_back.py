"""A method acts before it sees the tokens that are held back."""

from __future__ import annotations

import pytest

import kvfoundry
from kvfoundry.errors import DataError

PROMPT = " ".join(f"w{3 + i % 90}" for i in range(60))


def test_the_held_back_tokens_add_their_own_rows(tiny_model, tokenizer) -> None:
    model = tiny_model("llama")
    answer = kvfoundry.generate(
        model, tokenizer, [PROMPT], method="snapkv(budget=12, window=4)", hold_back=10, max_new_tokens=4, details=True
    )[0]
    assert answer.kept_rows == 12 + 10


def test_the_text_is_that_of_a_document_asked_later(tiny_model, tokenizer) -> None:
    model, words = tiny_model("qwen3"), PROMPT.split()
    spec = "l2norm(budget=12, skip_layers=0)"
    cache = kvfoundry.prefill(model, tokenizer, " ".join(words[:50]), spec)
    asked = kvfoundry.generate(model, tokenizer, " ".join(words[50:]), cache=cache, max_new_tokens=6)
    assert asked == kvfoundry.generate(model, tokenizer, PROMPT, method=spec, hold_back=10, max_new_tokens=6)


def test_a_batch_equals_its_rows(tiny_model, tokenizer) -> None:
    model, prompts = tiny_model("llama"), [PROMPT, " ".join(PROMPT.split()[:37])]
    options = dict(method="h2o(budget=14, window=4)", hold_back=6, max_new_tokens=6)
    together = kvfoundry.generate(model, tokenizer, prompts, **options)
    assert together == [kvfoundry.generate(model, tokenizer, prompt, **options) for prompt in prompts]


def test_with_the_full_cache_nothing_changes(tiny_model, tokenizer) -> None:
    model = tiny_model("llama")
    plain = kvfoundry.generate(model, tokenizer, PROMPT, max_new_tokens=6)
    assert plain == kvfoundry.generate(model, tokenizer, PROMPT, hold_back=9, prefill_chunk=16, max_new_tokens=6)


@pytest.mark.parametrize("hold_back", [-1, 60, 100])
def test_impossible_numbers_are_refused(hold_back, tiny_model, tokenizer) -> None:
    with pytest.raises(DataError, match="hold_back"):
        kvfoundry.generate(tiny_model("llama"), tokenizer, PROMPT, hold_back=hold_back, max_new_tokens=2)
