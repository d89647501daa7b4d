"""Where a model looks: against the attention that the model itself reports, and what the analyses make of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import _COMMON, FAMILIES
from transformers import AutoModelForCausalLM

from kvfoundry.analysis.coverage import coverage
from kvfoundry.analysis.drift import drift
from kvfoundry.analysis.prompts import Part, PassagePrompt, passage_prompt, samples_of
from kvfoundry.analysis.sparsity import effective, sparsity
from kvfoundry.analysis.traces import Trace, trace, traces
from kvfoundry.errors import DataError

from .test_heads import byte_tokenizer

pytest.importorskip("matplotlib")
ABOUT = {"model": "tiny"}
SIZES: dict[str, Any] = {**_COMMON, "vocab_size": 300, "max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def model_of(family: str, **sizes: Any) -> Any:
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(FAMILIES[family](**SIZES | sizes), attn_implementation="eager").eval()


def test_a_prompt_knows_its_parts(tokenizer):
    (sample,) = samples_of(None, limit=1, passages=6)
    prompt = passage_prompt(tokenizer, sample)
    assert len(sample.passages) == 6 == len(prompt.chunks) and len({p.text for p in sample.passages}) == 6
    assert [part.start for part in prompt.parts[1:]] == [part.stop for part in prompt.parts[:-1]]
    assert prompt.parts[0].start == 0 and prompt.parts[-1].stop == len(prompt.ids)
    for number, passage in zip(prompt.chunks, sample.passages, strict=True):
        part = prompt.parts[number]
        assert passage.text in tokenizer.decode(prompt.ids[part.start : part.stop]) and part.gold == passage.gold
    pieces = passage_prompt(tokenizer, sample, 100)
    assert pieces.ids == prompt.ids and len(pieces.chunks) > 6
    assert all(pieces.parts[i].stop - pieces.parts[i].start <= 100 for i in pieces.chunks)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_mass_and_likeness_are_those_of_the_models_own_attention(family, tokenizer):
    model, (sample,) = model_of(family), samples_of(None, limit=1, passages=2)
    prompt = passage_prompt(tokenizer, replace(sample, passages=sample.passages[:2]))
    found = trace(model, tokenizer, prompt, steps=4)
    ids = [*prompt.ids, *found.written[:-1]]
    assert len(found.written) == 4
    with torch.inference_mode():
        attentions = model(torch.tensor([ids]), output_attentions=True).attentions
    first, last = prompt.parts[prompt.chunks[0]].start, prompt.parts[prompt.chunks[-1]].stop
    for place, layer in enumerate(found.layers):
        rows = attentions[layer][0, :, len(prompt.ids) - 1 :]  # [heads, steps, rows]
        for step in range(4):
            expected = [float(rows[:, step, part.start : part.stop].sum(-1).mean()) for part in prompt.parts]
            expected.append(float(rows[:, step, len(prompt.ids) :].sum(-1).mean()))
            assert found.mass[step, place].tolist() == pytest.approx(expected, abs=1e-4)
        look = rows[:, :, first:last]
        for step in range(1, 4):
            for other, known in ((step - 1, found.to_previous), (0, found.to_first)):
                same = torch.cosine_similarity(look[:, step], look[:, other], dim=-1).mean()
                assert float(known[step - 1, place]) == pytest.approx(float(same), abs=1e-3)
    assert found.layers == ((0, 1) if family == "llama" else (1,))


def made_trace(shares: list[list[float]], item: str = "a") -> Trace:
    """A trace of one layer whose passages get these shares of half of the attention, step by step."""
    count = len(shares[0])
    parts = (
        Part("start", "start", 0, 1),
        *(Part(f"p{i}", "passage", i + 1, i + 2) for i in range(count)),
        Part("question", "question", count + 1, count + 2),
    )
    rows = [[0.3, *(0.5 * share for share in step), 0.2, 0.0] for step in shares]
    likeness = torch.ones(len(shares) - 1, 1)
    prompt = PassagePrompt(item, "?", tuple(range(count + 2)), parts)
    return Trace(
        prompt,
        (7,) * len(shares),
        tuple("x" * len(shares)),
        (0,),
        torch.tensor(rows)[:, None],
        likeness * 0.75,
        likeness * 0.5,
    )


def test_coverage_counts_the_chunks(tmp_path):
    found, paths = coverage([made_trace([[0.1, 0.6, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25]])], tmp_path, ABOUT)
    assert found["curve"] == pytest.approx([0, (0.6 + 0.25) / 2, (0.9 + 0.5) / 2, (1 + 0.75) / 2, 1], abs=1e-4)
    assert found["needed"] == {"0.5": 1.5, "0.8": 3.0, "0.9": 3.0, "0.95": 3.5, "0.99": 3.5}
    assert json.loads(paths[0].read_text()) == found and paths[1].read_bytes().startswith(b"\x89PNG")


def test_sparsity_of_one_chunk_and_of_all(tmp_path):
    found, _ = sparsity([made_trace([[1, 0, 0, 0], [0.25] * 4]), made_trace([[0.5, 0.5, 0, 0]])], tmp_path, ABOUT)
    assert found["idle"]["by_step_and_layer"] == [[0.625], [0.0]]
    assert found["effective"]["by_step_and_layer"] == [[0.375], [1.0]]
    assert float(effective(torch.full((8,), 0.125))) == pytest.approx(8)


def test_drift_needs_two_steps(tmp_path):
    found, _ = drift([made_trace([[1.0, 0.0]] * 3), made_trace([[1.0, 0.0]])], tmp_path, ABOUT)
    assert found["local"]["mean"] == 0.75 and found["to_first"]["by_step_and_layer"] == [[0.5], [0.5]]
    with pytest.raises(DataError, match="--steps"):
        drift([made_trace([[1.0, 0.0]])], tmp_path, ABOUT)


def test_what_cannot_be_traced(tokenizer):
    with pytest.raises(DataError, match="no full-attention layer"):
        traces(model_of("mistral"), tokenizer, limit=1, steps=2, passages=1)
    told = []
    with pytest.raises(DataError, match="no sample is left"):
        traces(model_of("llama", max_position_embeddings=64), tokenizer, limit=2, steps=2, on_skip=told.append)
    assert len(told) == 2 and "tokens and 2 steps in 64 positions" in told[0]
