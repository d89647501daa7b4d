"""kvfoundry.generate gives the text of plain model.generate, in batches, pieces, beams and streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, random_ids
from transformers import GenerationConfig, pipeline, set_seed
from transformers.generation.streamers import BaseStreamer

import kvfoundry
from kvfoundry.errors import DataError, KVFoundryError
from kvfoundry.method import Method
from kvfoundry.selection.budgets import HeadBudget, UniformBudget

from .replay import Recorder
from .support import EVICTING, NAMES, forward_pieces, granularities, greedy, small_spec


def words(tokens: int, seed: int) -> str:
    return " ".join(f"w{i}" for i in random_ids(tokens, seed=seed).tolist())


PROMPTS = [words(40, 1), words(17, 2), words(29, 3), words(9, 4)]


def plain(model: Any, tokenizer: Any, prompts: list[str], cache: Any, **options: Any) -> list[str]:
    """Texts of model.generate itself."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    caches = {} if cache is None else {"past_key_values": cache}
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **caches, **options}
    with torch.no_grad():
        output = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **options)
    return tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_that_of_model_generate(name, family, tiny_model, tokenizer):
    model, spec = tiny_model(family), small_spec(name)
    found = kvfoundry.generate(model, tokenizer, PROMPTS, spec, max_new_tokens=12)
    assert found == plain(model, tokenizer, PROMPTS, kvfoundry.KVCache(model, spec))


@pytest.mark.parametrize("name", NAMES)
def test_batches_of_any_size_give_the_same_texts(name, tiny_model, tokenizer):
    model, spec = tiny_model("qwen3"), small_spec(name)
    together = kvfoundry.generate(model, tokenizer, PROMPTS, spec, max_new_tokens=8)
    assert kvfoundry.generate(model, tokenizer, PROMPTS, spec, max_new_tokens=8, batch_size=3) == together
    assert [kvfoundry.generate(model, tokenizer, prompt, spec, max_new_tokens=8) for prompt in PROMPTS] == together


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_a_prompt_in_pieces_gives_the_text_of_the_full_cache(chunk, family, tiny_model, reference_model, tokenizer):
    model = tiny_model(family)
    expected = plain(reference_model(family), tokenizer, PROMPTS, None)
    assert kvfoundry.generate(model, tokenizer, PROMPTS, max_new_tokens=12, prefill_chunk=chunk) == expected


@pytest.mark.parametrize("name", EVICTING)
def test_a_prompt_in_pieces_is_evicted_after_each(name, tiny_model, tokenizer):
    """The same as feeding the pieces by hand, and a lower peak than the prompt at once."""
    model, spec, prompt = tiny_model("llama"), small_spec(name), words(320, 5)
    [found] = kvfoundry.generate(model, tokenizer, [prompt], spec, max_new_tokens=8, prefill_chunk=64, details=True)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    cache = kvfoundry.KVCache(model, spec)
    cache.expect_prompt(320)
    forward_pieces(model, cache, ids, [64] * 4)
    assert found.token_ids == greedy(model, cache, ids, steps=8)[0].tolist()
    [at_once] = kvfoundry.generate(model, tokenizer, [prompt], spec, max_new_tokens=8, details=True)
    assert found.peak_bytes < at_once.peak_bytes


def test_the_details_are_measured(tiny_model, tokenizer):
    model = tiny_model("llama")
    results = kvfoundry.generate(model, tokenizer, PROMPTS, "streamingllm(budget=8)", max_new_tokens=6, details=True)
    for result, prompt in zip(results, PROMPTS, strict=True):
        assert result.prompt_tokens == len(prompt.split()) and result.new_tokens == len(result.token_ids) == 6
        assert result.kept_rows == 8 and 0 < result.stored_bytes < result.full_bytes
        assert result.ttft_seconds > 0 and result.seconds >= result.ttft_seconds and result.notes == []


@pytest.mark.parametrize("name", NAMES)
def test_sampling_follows_the_seed(name, tiny_model, tokenizer):
    model, spec = tiny_model("gemma2"), small_spec(name)
    options: dict[str, Any] = dict(do_sample=True, temperature=1.5, top_k=50)
    first = kvfoundry.generate(model, tokenizer, PROMPTS, spec, max_new_tokens=6, seed=3, **options)
    assert first == kvfoundry.generate(model, tokenizer, PROMPTS, spec, max_new_tokens=6, seed=3, **options)
    assert first != kvfoundry.generate(model, tokenizer, PROMPTS, spec, max_new_tokens=6, seed=4, **options)
    set_seed(3)
    assert first == plain(model, tokenizer, PROMPTS, kvfoundry.KVCache(model, spec), max_new_tokens=6, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_and_several_sequences_equal_the_models_own(family, tiny_model, reference_model, tokenizer):
    """B33 for the full cache: 3 beams, 2 sequences each, a padded batch."""
    model, options = tiny_model(family), dict(num_beams=3, num_return_sequences=2)
    expected = plain(reference_model(family), tokenizer, PROMPTS, None, **options)
    assert kvfoundry.generate(model, tokenizer, PROMPTS, max_new_tokens=12, **options) == expected


# Small enough that ten steps write new codes.
CODED = [
    "int4(group=16, residual=8)",
    "rotate()+int4(group=16)",
    "fp8",
    "kivi(bits=2, group=8, residual=8)",
    "kvquant(bits=3, outliers=0.05)",
    "gear(bits=4, rank=2, block=8, group=16)",
    "think(ratio=0.5, window=8, recent=4, block=4)",
    "minicache(start=0.5)",
    "snapkv(budget=16, window=4)+kivi(bits=4, group=8, residual=8)",
]


@pytest.mark.parametrize(("name", "given"), granularities(EVICTING))
def test_every_beam_has_the_score_of_its_own_sequence(name, given, tiny_model):
    """B33: the score of a beam, reordered many times, equals that of its tokens fed alone to a new cache."""
    _check_beams(tiny_model("llama"), small_spec(name, **given))


@pytest.mark.parametrize("spec", CODED)
def test_every_beam_of_a_coded_cache_has_the_score_of_its_own_sequence(spec, tiny_model):
    """B33: codes, scales, outliers, factors, pairs and tails follow the beams together."""
    _check_beams(tiny_model("llama"), spec)


def _check_beams(model, spec):
    ids = random_ids(1, 30, seed=11)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=kvfoundry.KVCache(model, spec), max_new_tokens=10,
        num_beams=4, num_return_sequences=4, length_penalty=0.0, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    for sequence, score in zip(output.sequences, output.sequences_scores, strict=True):
        logits = forward_pieces(model, kvfoundry.KVCache(model, spec), sequence[None], [30] + [1] * 9 + [1])
        chosen = logits[0, 29:39].log_softmax(-1).gather(1, sequence[30:, None]).sum()
        assert float(chosen) == pytest.approx(float(score), abs=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_lookup_equals_greedy(family, tiny_model, reference_model):
    """B35: windows of 16 are filled long before the 60 new tokens are there."""
    model = tiny_model(family)
    ids = random_ids(1, 12, seed=13).repeat(1, 4)
    expected = greedy(reference_model(family), None, ids, steps=60)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=kvfoundry.KVCache(model), max_new_tokens=60,
        do_sample=False, prompt_lookup_num_tokens=5, pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(output[:, 48:], expected)


def test_assisted_decoding_equals_greedy(tiny_model, own_model, reference_model):
    """B35: draft tokens of another model, most of them taken back."""
    model, draft, ids = tiny_model("mistral"), own_model("llama"), random_ids(1, 30, seed=14)
    expected = greedy(reference_model("mistral"), None, ids, steps=60)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=kvfoundry.KVCache(model), max_new_tokens=60,
        do_sample=False, assistant_model=draft, pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(output[:, 30:], expected)


@pytest.mark.parametrize("name", EVICTING)
def test_prompt_lookup_over_an_evicting_cache_is_refused(name, tiny_model, tokenizer):
    """B35: refused, with a reason, before there is a wrong token."""
    model, seen = tiny_model("llama"), []

    class Streamer(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            seen.append(value)

        def end(self) -> None:
            pass

    ids = random_ids(1, 12, seed=13).repeat(1, 4)
    with pytest.raises(ValueError, match=r"crop|cannot take tokens back|rollback|roll back"):
        model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=kvfoundry.KVCache(model, small_spec(name)),
            max_new_tokens=20, do_sample=False, prompt_lookup_num_tokens=5, pad_token_id=0, streamer=Streamer(),
        )  # fmt: skip
    assert sum(value.numel() for value in seen) <= ids.numel()  # the prompt only


def test_a_streamer_gets_every_token(tiny_model, tokenizer):
    tokens: list[int] = []
    ended: list[bool] = []

    class Streamer(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            tokens.extend(value.flatten().tolist())

        def end(self) -> None:
            ended.append(True)

    model = tiny_model("llama")
    [result] = kvfoundry.generate(
        model, tokenizer, PROMPTS[:1], "tova(budget=8)", max_new_tokens=6, streamer=Streamer(), details=True
    )
    assert tokens[-6:] == result.token_ids and ended == [True]


def test_generation_config_and_stop_words_are_transformers_own(tiny_model, tokenizer):
    model = tiny_model("llama")
    whole = kvfoundry.generate(model, tokenizer, PROMPTS[0], max_new_tokens=12).split()
    stop = next(i for i in range(3, 12) if whole[i] not in whole[:i])
    config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=int(whole[stop][1:]), pad_token_id=0)
    found = kvfoundry.generate(model, tokenizer, PROMPTS[0], generation_config=config, max_new_tokens=12)
    assert found.split() == whole[: stop + 1]


@pytest.mark.parametrize("name", NAMES)
def test_the_text_generation_pipeline_takes_our_cache(name, tiny_model, tokenizer):
    model, spec = tiny_model("qwen2"), small_spec(name)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    expected = kvfoundry.generate(model, tokenizer, PROMPTS[0], spec, max_new_tokens=8)
    options: dict[str, Any] = dict(max_new_tokens=8, do_sample=False, return_full_text=False)
    [found] = pipe(PROMPTS[0], past_key_values=kvfoundry.KVCache(model, spec), **options)
    assert found["generated_text"].split() == expected.split()


@pytest.mark.parametrize("name", NAMES)
def test_questions_on_forks_of_a_document_do_not_disturb_each_other(name, tiny_model, tokenizer):
    """B38: five questions, asked twice in different orders."""
    model, document = tiny_model("gemma3"), words(40, 20)
    cache = kvfoundry.KVCache(model, small_spec(name))
    forward_pieces(model, cache, tokenizer(document, return_tensors="pt")["input_ids"], [40])
    questions = [words(3 + i, 30 + i) for i in range(5)]
    size, seen = cache.nbytes, cache.seen_tokens

    def ask(i: int) -> str:
        return kvfoundry.generate(model, tokenizer, questions[i], cache=cache.fork(), max_new_tokens=6)

    first = [ask(i) for i in range(5)]
    assert {i: ask(i) for i in (3, 1, 4, 0, 2)} == dict(enumerate(first))
    assert cache.nbytes == size and cache.seen_tokens == seen
    if name == "fullkv":
        expected = [
            kvfoundry.generate(model, tokenizer, f"{document} {question}", max_new_tokens=6) for question in questions
        ]
        assert first == expected


@pytest.mark.parametrize("bad", ["", "  ", ["w5", ""], [3]])
def test_an_empty_prompt_is_refused(bad, tiny_model, tokenizer):
    with pytest.raises(DataError, match="empty"):
        kvfoundry.generate(tiny_model("llama"), tokenizer, bad, max_new_tokens=4)


def test_a_prompt_beyond_the_models_limit_is_refused(tiny_model, tokenizer):
    with pytest.raises(DataError, match="1024"):
        kvfoundry.generate(tiny_model("llama"), tokenizer, words(1020, 1), max_new_tokens=8)
    with pytest.raises(KVFoundryError):
        kvfoundry.generate(tiny_model("llama"), tokenizer, "w5", max_new_tokens=8, prefill_chunk=0)


def test_several_prompts_cannot_continue_one_cache(tiny_model, tokenizer):
    model = tiny_model("llama")
    with pytest.raises(DataError, match="fork"):
        kvfoundry.generate(model, tokenizer, PROMPTS, cache=kvfoundry.KVCache(model), max_new_tokens=4)


def test_unequal_layers_and_heads_decode_on_both_backends(own_model, reference_model):
    """B30: visibly different lengths in layers and heads, 20 steps: no crash, the same tokens on eager and SDPA."""

    class Uneven(HeadBudget):
        def allocate(self, scores: Any, evidence: Any, rows: Any, protected: Any) -> torch.Tensor:
            shift = torch.tensor([4, -4])
            return torch.minimum(evidence.rows.lengths, rows[:, None] + shift)

    class Steep(UniformBudget):
        def rows(self, seen: Any, layer_idx: int, num_layers: int) -> torch.Tensor:
            return super().rows(seen, layer_idx, num_layers) + (8 if layer_idx == 0 else -8)

    ids, tokens = random_ids(2, 40), []
    method = Method.parse("snapkv(budget=16, window=4)").replace(heads=Uneven(), budget=Steep(16))
    for backend in ("eager", "sdpa"):
        model = own_model("llama")
        kvfoundry.attach(model, attn_implementation=backend)
        cache = kvfoundry.KVCache(model, method)
        tokens.append(greedy(model, cache, ids, steps=20))
        grown = 19
        assert [layer.lengths[0].tolist() for layer in cache.layers] == [
            [28 + grown, 20 + grown],
            [12 + grown, 4 + grown],
        ]
    assert torch.equal(*tokens)
    model, sequence = own_model("llama"), random_ids(1, 52, seed=4)
    recorder = Recorder(model, kvfoundry.KVCache(model, method), 52)
    found = [
        recorder.feed(sequence[:, start:stop]) for start, stop in ((0, 40), (40, 41), (41, 46), (46, 47), (47, 52))
    ]
    expected = recorder.replayed(reference_model("llama"), sequence)
    assert float((torch.cat(found, dim=1) - expected).abs().max()) < 1e-4
