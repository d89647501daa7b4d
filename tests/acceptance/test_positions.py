"""B18 and B21: what happens when the text is longer than the cache, or than the model was trained for."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_ids

import kvfoundry
from kvfoundry.evaluate.metrics import score_answers
from kvfoundry.method import Method

CITIES = ("Lisbon", "Oslo", "Kyoto", "Lima", "Cairo", "Athens", "Havana", "Nairobi", "Toronto", "Mumbai")
ANIMALS = ("penguin", "tiger", "dolphin", "camel", "rabbit", "turtle", "zebra", "parrot", "giraffe", "monkey")


def record_list(records: int, seed: int) -> tuple[str, str]:
    """A list of records about as long as asked, a question about the last one, and its answer."""
    picks = torch.randint(0, 10, (records, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    lines = [
        f"Record {i}: in {CITIES[city]} the {1900 + (7 * i) % 120} parade was led by a keeper and a {ANIMALS[beast]}."
        for i, (city, beast) in enumerate(picks)
    ]
    lines[-1] = f"Last record: the mayor of {CITIES[picks[-1][0]]} keeps a {ANIMALS[picks[-1][1]]} as a pet."
    question = f"What animal does the mayor of {CITIES[picks[-1][0]]} keep as a pet?"
    return "\n".join(lines) + f"\n\nQuestion: {question}", ANIMALS[picks[-1][1]]


@pytest.mark.embedded
@pytest.mark.slow
def test_a_prompt_longer_than_the_cache_is_still_answered() -> None:
    """B18: 2,000-token record lists, the cache at half its length, a question about the last record.

    H2O's default window of 32 tokens ends inside the question; here it protects the last record too.
    """
    model, tokenizer = kvfoundry.load("smollm2", device="cpu")
    asked = [record_list(83, seed) for seed in (1, 2)]
    methods = ["fullkv", "snapkv(budget=0.5)", "streamingllm(budget=0.5)", "h2o(budget=0.5, window=128)"]
    prompts = [prompt for prompt, _ in asked]
    found = kvfoundry.generate_together(model, tokenizer, prompts, methods, 14, chat=True)
    scores: dict[str, float] = {}
    for method, answers in zip(methods, found, strict=True):
        assert all(1800 < answer.prompt_tokens < 2600 for answer in answers)
        graded = zip(answers, asked, strict=True)
        scores[method] = sum(score_answers([answer], said.text)[0] for said, (_, answer) in graded)
    assert scores["fullkv"] == len(asked)
    assert all(score >= 0.9 * scores["fullkv"] for score in scores.values()), scores


def test_a_stream_never_leaves_the_trained_positions(tiny_model) -> None:
    """B21: 1,000 tokens one by one through a model of 128 positions.

    Every logit equals that of the kept tokens fed alone at positions 0, 1, 2, ...: so no distance above the budget is
    ever used, and perplexity is that of the windowed reference.
    """
    model = tiny_model("llama", max_position_embeddings=128, num_hidden_layers=1)
    ids, budget, sinks = random_ids(1, 1000, seed=4), 64, 4
    cache = kvfoundry.KVCache(model, f"streamingllm(budget={budget}, sinks={sinks}, positions='slot')")
    losses, expected = [], []
    with torch.inference_mode():
        for i in range(999):
            logits = model(ids[:, i : i + 1], None, None, cache).logits[0, -1]
            if i % 37 == 0 or i > 990:
                kept = list(range(i + 1)) if i < budget else [*range(sinks), *range(i - (budget - sinks), i + 1)]
                assert len(kept) <= 128
                alone = model(ids[:, kept], position_ids=torch.arange(len(kept))[None]).logits[0, -1]
                torch.testing.assert_close(logits, alone, rtol=0, atol=1e-4)
                losses.append(torch.nn.functional.cross_entropy(logits, ids[0, i + 1]))
                expected.append(torch.nn.functional.cross_entropy(alone, ids[0, i + 1]))
    perplexity = torch.stack(losses).mean().exp()
    assert torch.isfinite(perplexity)
    torch.testing.assert_close(perplexity, torch.stack(expected).mean().exp(), rtol=1e-3, atol=0)


def test_slot_positions_are_a_parameter_of_streamingllm() -> None:
    assert Method.parse("streamingllm(budget=8, positions=slot)").slot_positions
    assert not Method.parse("streamingllm(budget=8)").slot_positions
