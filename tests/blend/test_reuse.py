"""Documents through `generate` and `blended_cache`: the prompt that is read, what is stored, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import random_ids
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import kvfoundry
from kvfoundry.blend import blend_chunks, blended_cache, segment
from kvfoundry.errors import DataError, KVFoundryError, SpecError

from .support import passages, read_all

Models = Callable[..., PreTrainedModel]
TEMPLATE = (
    "{% for m in messages %}<bos> w11 {{ m['content'] }} w12{% endfor %}{% if add_generation_prompt %} w13{% endif %}"
)


def words(count: int, seed: int) -> str:
    return " ".join(f"w{token}" for token in random_ids(count, seed=seed).tolist())


DOCUMENTS = [words(14, 1), words(9, 2), words(21, 3)]


@pytest.mark.parametrize(
    "method", ["fullkv", "snapkv(budget=16, window=4)", "kvzip(budget=0.5)", "quest(budget=24, page=4)"]
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_at_ratio_one_documents_are_a_prompt_like_any_other(
    family: str, method: str, tiny_model: Models, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = tiny_model(family)
    text = "\n\n".join([*DOCUMENTS, "w5 w6 w7 w8 w9"])
    whole = kvfoundry.generate(model, tokenizer, text, method, 8, details=True)
    found = kvfoundry.generate(
        model, tokenizer, "w5 w6 w7 w8 w9", method, 8, documents=DOCUMENTS, blend="blend(ratio=1.0)", details=True
    )
    assert (found.text, found.prompt_tokens, found.kept_rows) == (whole.text, whole.prompt_tokens, whole.kept_rows)
    assert (found.recomputed_tokens, found.reused_tokens) == (44, 0)


def test_a_chat_template_opens_before_the_documents_and_closes_behind_the_question(
    tiny_model: Models, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = TEMPLATE
    try:
        (prompt,) = blended_cache(
            tiny_model("llama"), tokenizer, DOCUMENTS, "w5 w6", head="w20 ", chat=True, answer_prefix=" w30"
        ).segments
        assert prompt.head == (1, 11, 20)
        assert prompt.question == (5, 6, 12, 13, 30)
        text = f"w20 {' '.join(DOCUMENTS)} w5 w6"
        options: dict[str, Any] = {"chat": True, "answer_prefix": " w30", "max_new_tokens": 6}
        whole = kvfoundry.generate(tiny_model("llama"), tokenizer, text, **options)
        options |= {"documents": DOCUMENTS, "head": "w20 ", "blend": "blend(ratio=1.0)"}
        assert kvfoundry.generate(tiny_model("llama"), tokenizer, "w5 w6", **options) == whole
    finally:
        tokenizer.chat_template = None


def test_a_chunk_serves_every_prompt_with_what_it_was_read_behind(
    tiny_model: Models, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = tiny_model("llama")

    def hits(store: kvfoundry.ChunkStore, **how: Any) -> int:
        found = blended_cache(model, tokenizer, DOCUMENTS, "w5", store=store, **how)
        return sum(passage.hit for passage in found.passages[0])

    with kvfoundry.ChunkStore("host:64MiB") as store:
        assert [hits(store, head=head) for head in ("w20", "w20", "w21")] == [0, 3, 0]
        assert [hits(store, head=head, behind="start") for head in ("w20", "w21", "w22")] == [0, 3, 3]
        assert hits(store) == 3  # no head and no special tokens in front: nothing, too
        assert [hits(store, chunk_method="l2norm(budget=0.5)") for _ in range(2)] == [0, 3]
        assert [hits(store, chunk_method="l2norm(budget=0.4)") for _ in range(2)] == [0, 3]


def test_a_changed_weight_misses(own_model: Models, tokenizer: PreTrainedTokenizerFast) -> None:
    """The identity is remembered between requests, and made anew when the model has changed."""
    model = own_model("llama")
    with kvfoundry.ChunkStore("host:64MiB") as store:

        def hits() -> list[bool]:
            found = blended_cache(model, tokenizer, DOCUMENTS[:2], "w5", store=store)
            return [passage.hit for passage in found.passages[0]]

        assert [hits(), hits()] == [[False, False], [True, True]]
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[3, 5] += 0.5
        assert [hits(), hits()] == [[False, False], [True, True]]


def test_prompts_are_answered_in_batches_in_order(tiny_model: Models, tokenizer: PreTrainedTokenizerFast) -> None:
    questions = ["w5 w6 w7", "w8", "w9 w10 w11 w12"]
    options: dict[str, Any] = {"documents": DOCUMENTS, "max_new_tokens": 5, "blend": "blend(ratio=0.3)"}
    model = tiny_model("qwen3")
    alone = [kvfoundry.generate(model, tokenizer, question, **options) for question in questions]
    assert kvfoundry.generate(model, tokenizer, questions, batch_size=2, **options) == alone
    assert kvfoundry.generate(model, tokenizer, questions, prefill_chunk=2, **options) == alone


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"documents": []}, "documents is empty"),
        ({"documents": ["w3", " "]}, "document 1 is empty"),
        ({"documents": "w3 w4"}, "documents is empty; give a list"),
        ({"documents": [["w3"], ["w4"]]}, "2 lists of documents for 1 questions"),
        ({"documents": ["w3"], "hold_back": 2}, "leave cache and hold_back out"),
        ({"documents": ["w3"], "chat": True}, "no chat template"),
        ({"documents": ["w3"], "blend": "blend(ratio=2)"}, "ratio must be from 0 to 1"),
        ({"documents": ["w3"], "blend": "blend(check=5)"}, "not one of the model's attention layers 0 to 1"),
        ({"documents": [words(1020, 1)]}, "has 1022 tokens and asks for 4 more, but the model is limited to 1024"),
        ({"documents": ["w3"], "method": "noncausal(budget=8)"}, "a blended prompt has only some"),
        ({"documents": ["w3"], "chunk_method": "nothing"}, "unknown method"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_computed(
    how: dict[str, Any], message: str, tiny_model: Models, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(KVFoundryError, match=message) as caught:
        kvfoundry.generate(tiny_model("llama"), tokenizer, "w5 w6", max_new_tokens=4, **how)
    assert "\n" not in str(caught.value)


def test_chunks_of_another_model_are_refused(tiny_model: Models) -> None:
    model = tiny_model("llama")
    foreign = {
        "3 attention layers": tiny_model("llama", num_hidden_layers=3),
        "4 heads": tiny_model("llama", num_key_value_heads=4),
        "torch.bfloat16": copy.deepcopy(model).to(torch.bfloat16),
        "width 32": tiny_model("llama", head_dim=32),
    }
    for part, other in foreign.items():
        with pytest.raises(DataError, match=f"made with another model: it has .*{part}.* and LlamaForCausalLM"):
            blend_chunks(model, [read_all(other, passages((5,)))])
    small = tiny_model("llama", vocab_size=64)
    with pytest.raises(DataError, match="its tokens are not in LlamaForCausalLM"):
        blend_chunks(small, [read_all(model, [torch.tensor([3, 100])])])


def test_what_a_selector_or_a_batch_lacks_is_named(tiny_model: Models) -> None:
    model = tiny_model("llama")
    chunks = read_all(model, passages((5, 6)))
    with pytest.raises(DataError, match="chooses by the question"):
        blend_chunks(model, [chunks], blend="blend(select=query_aware)")
    with pytest.raises(DataError, match="2 questions for 1 prompts"):
        blend_chunks(model, [chunks], [[3], [4]])
    for nothing in ([], [[]], [chunks, []]):
        with pytest.raises(DataError, match="no chunks to blend"):
            blend_chunks(model, nothing)
    with pytest.raises(SpecError, match="behind must be one of head, start"):
        blended_cache(model, None, ["w3"], behind="tail")  # type: ignore[arg-type]


def test_segments_do_not_depend_on_their_neighbours(tokenizer: PreTrainedTokenizerFast) -> None:
    one, other = segment(tokenizer, DOCUMENTS, "w5", head="w9"), segment(tokenizer, DOCUMENTS[::-1], "w6 w7")
    assert other.passages == one.passages[::-1]
    assert one.ids == [*one.head, *sum(one.passages, ()), *one.question]
    assert segment(tokenizer, ["w3"]).question == ()


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3, "seed": 1},
    ],
    ids=str,
)
def test_beams_and_several_answers_are_those_of_a_plain_prompt(
    options: dict[str, Any], tiny_model: Models, tokenizer: PreTrainedTokenizerFast
) -> None:
    model, questions = tiny_model("llama"), ["w5 w6", "w9 w9 w8"]
    plain = [f"{' '.join(DOCUMENTS)} {question}" for question in questions]
    wanted = kvfoundry.generate(model, tokenizer, plain, max_new_tokens=5, **options)
    found = kvfoundry.generate(
        model, tokenizer, questions, documents=DOCUMENTS, blend="blend(ratio=1.0)", max_new_tokens=5, **options
    )
    assert found == wanted
