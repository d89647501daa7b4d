"""Text from the engine is the text of the plain loop: families, methods, padding, stops, sampling, streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, build, random_ids
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

import kvfoundry
from kvfoundry import DecodeEngine, KVCache
from kvfoundry.errors import KVFoundryError


def words(tokens: int, seed: int) -> str:
    return " ".join(f"w{i}" for i in random_ids(tokens, seed=seed).tolist())


PROMPTS = [words(40, 1), words(17, 2), words(29, 3), words(9, 4)]
# that act at the prompt's end alone; that overwrite the oldest row; that overwrite the lowest score
SPECS = [
    "fullkv",
    "snapkv(budget=8, window=4)",
    "adakv(budget=8, window=4)",
    "pyramidkv(budget=8, window=4)",
    "kvzip(budget=8)",
    "l2norm(budget=8)",
    "pyramidkv(budget=8, window=4, granularity='query_head')",
    "adakv(budget=8, window=4)+weighted_merge()",
    "streamingllm(budget=8, sinks=2)",
    "streamingllm(budget=0.5)",
    "h2o(budget=8, window=4)",
    "h2o(budget=0.4, window=4)",
    "h2o(budget=12, window=3, normalize=True)+protect(sinks=2)",
    "tova(budget=8)",
    "tova(budget=20)",
    "quest(budget=8, page=4, skip_layers=0)",
    "quest(budget=16, page=4, skip_layers=1, group='mean')",
    "adakv(budget=12, window=4)+quest(budget=8, page=4, skip_layers=0)",
    "kivi(bits=2, group=4, residual=8)",
    "kivi(bits=4, group=8, residual=0)+rotate()",
    "int8(group=8)",
    "int4(group=8, mode=zero_point)",
    "fp8()",
    "snapkv(budget=16, window=4)+kivi(bits=4, group=4, residual=4)",
    "adakv(budget=16, window=4)+int8(group=8, mode=symmetric)",
    "headinfer()",
    "snapkv(budget=16, window=4)+headinfer(group=2)",
    "adakv(budget=16, window=4)+headinfer()",
    "headinfer()+kivi(bits=2, group=4, residual=8)",
    "headinfer(group=2)+kivi(bits=4, group=8, residual=0)+rotate()",
    "headinfer()+int8(group=8)",
    "adakv(budget=8, window=4)+headinfer()+int8(group=8)",
    "quest(budget=16, page=4, skip_layers=1)+headinfer()",
    "adakv(budget=24, window=4)+quest(budget=8, page=4, skip_layers=0)+headinfer()",
]


def both(model: Any, tokenizer: Any, prompts: Any, spec: Any = None, **options: Any) -> tuple[Any, Any, DecodeEngine]:
    """Generations of the plain loop and of an engine, and the engine."""
    engine = DecodeEngine(model, room=1)
    options = {"max_new_tokens": 18, "details": True, **options}
    plain = kvfoundry.generate(model, tokenizer, prompts, spec, engine=False, **options)
    return plain, kvfoundry.generate(model, tokenizer, prompts, spec, engine=engine, **options), engine


def ids(generations: Any) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


# every method on some families, some methods on all
CASES = [
    (family, spec)
    for family in FAMILIES
    for spec in (
        SPECS if family in ("llama", "gemma3") else ["fullkv", "adakv(budget=8, window=4)", "h2o(budget=8, window=4)"]
    )
]


@pytest.mark.parametrize(("family", "spec"), CASES)
def test_the_text_is_that_of_the_plain_loop(family: str, spec: str, tiny_model, tokenizer) -> None:
    plain, found, engine = both(tiny_model(family), tokenizer, PROMPTS, spec)
    assert ids(found) == ids(plain)
    assert engine.recorded == 1
    assert [g.notes for g in found] == [g.notes for g in plain]
    assert [(g.stored_bytes, g.kept_rows, g.peak_bytes) for g in found] == [
        (g.stored_bytes, g.kept_rows, g.peak_bytes) for g in plain
    ]


@pytest.mark.parametrize("spec", ["fullkv", "h2o(budget=8, window=4)"])
def test_rows_stop_one_by_one(spec: str, tiny_model, tokenizer) -> None:
    model = tiny_model("llama")
    free = both(model, tokenizer, PROMPTS, spec)[0]
    stops = [free[0].token_ids[5], free[2].token_ids[9]]
    plain, found, _ = both(model, tokenizer, PROMPTS, spec, eos_token_id=stops)
    assert ids(found) == ids(plain)
    assert len({len(answer) for answer in ids(found)}) > 1
    plain, found, _ = both(model, tokenizer, PROMPTS, spec, eos_token_id=stops, min_new_tokens=12)
    assert ids(found) == ids(plain) and min(map(len, ids(found))) >= 12


def test_a_stop_at_the_first_token_needs_no_engine(tiny_model, tokenizer) -> None:
    model = tiny_model("llama")
    first = both(model, tokenizer, PROMPTS[0])[0].token_ids[0]
    plain, found, engine = both(model, tokenizer, PROMPTS[0], eos_token_id=first)
    assert found.token_ids == plain.token_ids == [first]
    plain, found, engine = both(model, tokenizer, PROMPTS[0], max_new_tokens=1)
    assert found.token_ids == plain.token_ids and engine.recorded == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "top_k": 12},
        {"top_p": 0.8, "num_return_sequences": 3},
        {"min_p": 0.05, "repetition_penalty": 1.3},
        {"typical_p": 0.9, "min_length": 50, "eos_token_id": 7},
    ],
)
def test_sampled_text_is_the_same_with_the_same_seed(options: dict[str, Any], tiny_model, tokenizer) -> None:
    plain, found, engine = both(tiny_model("qwen2"), tokenizer, PROMPTS, do_sample=True, seed=5, **options)
    assert ids(found) == ids(plain)
    assert engine.recorded == 1


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.5}, {"suppress_tokens": [3, 4, 5]}, {"max_new_tokens": 2}, {"seed": 1}]
)
def test_greedy_text_under_processors(options: dict[str, Any], tiny_model, tokenizer) -> None:
    plain, found, _ = both(
        tiny_model("gemma2"), tokenizer, PROMPTS, "h2o(budget=8, window=4)", do_sample=False, **options
    )
    assert ids(found) == ids(plain)


class Collected(BaseStreamer):
    def __init__(self) -> None:
        self.put_tokens: list[Any] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended
        self.put_tokens.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_stream_brings_the_same_pieces(tiny_model, tokenizer) -> None:
    model = tiny_model("llama")
    stop = both(model, tokenizer, PROMPTS[0])[0].token_ids[7]
    pieces = []
    for engine in (False, True):
        streamer = Collected()
        kvfoundry.generate(
            model, tokenizer, PROMPTS[0], max_new_tokens=20, streamer=streamer, engine=engine, eos_token_id=stop
        )
        assert streamer.ended == 1
        pieces.append(streamer.put_tokens)
    assert pieces[0] == pieces[1]


def letters() -> PreTrainedTokenizerFast:
    """One token per byte: transformers' search for stop strings needs to know how tokens are joined."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:124]
    core = Tokenizer(models.BPE({"<pad>": 0, "<bos>": 1, "<unk>": 2} | {c: i + 3 for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", padding_side="left")


def test_stop_strings(tiny_model) -> None:
    model, tokenizer = tiny_model("llama"), letters()
    whole = both(model, tokenizer, "some text", max_new_tokens=20)[0]
    stop = tokenizer.decode(whole.token_ids[6:8])
    plain, found, engine = both(model, tokenizer, "some text", stop_strings=[stop], max_new_tokens=20)
    assert found.token_ids == plain.token_ids and len(found.token_ids) <= 8 and engine.recorded == 1
    config = GenerationConfig(stop_strings=[stop], max_new_tokens=20)
    plain, found, _ = both(model, tokenizer, "some text", generation_config=config)
    assert found.token_ids == plain.token_ids and "stop_strings" in found.notes[-1]


def test_criteria_of_ones_own(tiny_model, tokenizer) -> None:
    model = tiny_model("llama")

    def after_five(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 17 + 5, dtype=torch.bool)

    plain, found, _ = both(model, tokenizer, PROMPTS[1], stopping_criteria=[after_five])
    assert found.token_ids == plain.token_ids and found.new_tokens == 5


@pytest.mark.parametrize("options", [{"prefill_chunk": 7}, {"hold_back": 5}, {"batch_size": 2}])
def test_other_ways_of_reading_the_prompt(options: dict[str, Any], tiny_model, tokenizer) -> None:
    plain, found, _ = both(tiny_model("qwen3"), tokenizer, PROMPTS, "h2o(budget=8, window=4)", **options)
    assert ids(found) == ids(plain)


@pytest.mark.parametrize(
    "spec",
    [
        "fullkv",
        "snapkv(budget=8, window=4)",
        "adakv(budget=8, window=4)",
        "quest(budget=8, page=4, skip_layers=0)",
        "streamingllm(budget=8)",
        "h2o(budget=8, window=4)",
        "headinfer()",
        "adakv(budget=8, window=4)+headinfer(group=2)",
        "quest(budget=8, page=4, skip_layers=1)+headinfer()",
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cache_goes_on_after_the_engine(family: str, spec: str, tiny_model, tokenizer) -> None:
    """Rows, positions, statistics and counts are those that the plain loop leaves: the next question shows it."""
    model, states, texts = tiny_model(family), [], []
    for engine in (False, True):
        document = kvfoundry.prefill(model, tokenizer, PROMPTS[0], spec)
        asked = document.fork()
        said = [
            kvfoundry.generate(model, tokenizer, question, cache=asked, engine=engine, max_new_tokens=9)
            for question in (words(6, 8), words(5, 9))
        ]
        said.append(kvfoundry.generate(model, tokenizer, words(4, 7), cache=document, engine=engine, max_new_tokens=9))
        texts.append(said)
        states.append(asked)
    assert texts[0] == texts[1]
    plain, found = states
    assert plain.seen_tokens == found.seen_tokens and plain.notes == found.notes
    for ours, theirs in zip(found.attention_layers, plain.attention_layers, strict=True):
        assert torch.equal(ours.real, theirs.real) and ours.rows_lost_at == theirs.rows_lost_at
        if ours.rule.span is None:
            assert torch.equal(ours.positions, theirs.positions)
            torch.testing.assert_close(ours.keys, theirs.keys)
            for name, column in ours.rows.view().columns.items():
                torch.testing.assert_close(column, theirs.rows.view().columns[name])


def test_an_engine_records_anew_only_for_another_shape(tiny_model, tokenizer) -> None:
    model = tiny_model("llama")
    engine = DecodeEngine(model, room=64)
    for prompt, spec, sampled, recorded in [
        (PROMPTS[0], "snapkv(budget=8, window=4)", False, 1),
        (PROMPTS[1], "snapkv(budget=8, window=4)", False, 1),
        (PROMPTS[1], "adakv(budget=8, window=4)", False, 2),
        (PROMPTS[2], "adakv(budget=8, window=4)", False, 2),
        (PROMPTS[2], "h2o(budget=8, window=4)", False, 3),
        (PROMPTS[3], "h2o(budget=8, window=4)", False, 3),
        (PROMPTS[3], "h2o(budget=8, window=4)", True, 4),
        (PROMPTS[:2], "h2o(budget=8, window=4)", True, 5),
    ]:
        options = {"max_new_tokens": 12, "do_sample": sampled, "seed": 3}
        found = kvfoundry.generate(model, tokenizer, prompt, spec, engine=engine, **options)
        assert found == kvfoundry.generate(model, tokenizer, prompt, spec, engine=False, **options)
        assert engine.recorded == recorded
    assert engine.nbytes > 0
    engine.clear()
    assert engine.nbytes == 0


@pytest.mark.parametrize(
    ("spec", "options", "reason"),
    [
        ("minicache()", {}, "shares rows between layers"),
        ("kivi(group=8, residual=8, flow=paper)", {}, "at different times"),
        ("kvquant(bits=3)", {}, "no kernel of the engine reads"),
        ("int8()+quest(budget=16, page=4, skip_layers=0)", {}, "drops or leaves out"),
        ("quest(budget=16, page=4, skip_layers=0, rule='evaluation')", {}, "rule 'evaluation'"),
        ("h2o(budget=24, window=4)+quest(budget=16, page=4, skip_layers=0)", {}, "change places"),
        ("h2o(budget=8, window=4)+schedule(every=4)", {}, "strides of 4"),
        ("h2o(budget=8, window=4, leaving='skip')", {}, "unread"),
        ("h2o(budget=8, window=4, group='max')", {}, "no form of fixed shape"),
        ("streamingllm(budget=8, positions='slot')", {}, "moves its sinks"),
        ("fullkv", {"num_beams": 2, "do_sample": False}, "beam search"),
        ("fullkv", {"no_repeat_ngram_size": 3}, "NoRepeatNGram"),
        ("fullkv", {"return_dict_in_generate": True}, "scores or states"),
    ],
)
def test_the_plain_loop_steps_in_and_says_why(
    spec: str, options: dict[str, Any], reason: str, tiny_model, tokenizer
) -> None:
    model = tiny_model("llama")
    plain, found, engine = both(model, tokenizer, PROMPTS[0], spec, max_new_tokens=6, **options)
    assert found.token_ids == plain.token_ids and engine.recorded == 0
    [note] = [note for note in found.notes if note not in plain.notes]
    assert note.startswith("decoded by the plain loop: ") and reason in note


@pytest.mark.parametrize("options", [{}, {"eos_token_id": True}])
def test_the_plain_loop_goes_on_where_the_rows_of_the_prompt_say_so(
    options: dict[str, Any], tiny_model, tokenizer
) -> None:
    model, spec = tiny_model("llama"), "quest(budget=0.3, page=4, skip_layers=0)"
    plain, found, engine = both(model, tokenizer, PROMPTS, spec)
    if options:  # one row ends with the first token, before it is known who goes on
        plain, found, engine = both(model, tokenizer, PROMPTS, spec, eos_token_id=plain[1].token_ids[0])
        assert len(plain[1].token_ids) == 1
    assert ids(found) == ids(plain) and engine.recorded == 0
    assert "a different number of pages of every sequence" in found[0].notes[-1]
    # alone, each is served
    plain, found, engine = both(model, tokenizer, PROMPTS[0], spec)
    assert found.token_ids == plain.token_ids and engine.recorded == 1


def test_a_model_that_is_not_served_says_why(tokenizer) -> None:
    model = build("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    _, found, _ = both(model, tokenizer, PROMPTS[0], max_new_tokens=4)
    assert "depend on the length of the text" in found.notes[-1]


def test_kernels_can_be_insisted_on(tiny_model, tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr("kvfoundry.engine.choosing.without_triton", lambda device: "the model is on a toaster")
    with pytest.raises(KVFoundryError, match="toaster"):
        kvfoundry.generate(model, tokenizer, PROMPTS[0], require_kernels=True)
    monkeypatch.setattr("kvfoundry.engine.choosing.without_triton", lambda device: None)
    with pytest.raises(KVFoundryError, match="cannot serve this: minicache"):
        kvfoundry.generate(model, tokenizer, PROMPTS[0], "minicache()", require_kernels=True)
    with pytest.raises(KVFoundryError, match="NoRepeatNGram"):
        kvfoundry.generate(model, tokenizer, PROMPTS[0], require_kernels=True, no_repeat_ngram_size=3)
    with pytest.raises(KVFoundryError, match="engine=False"):
        kvfoundry.generate(model, tokenizer, PROMPTS[0], require_kernels=True, engine=False)
    with pytest.raises(KVFoundryError, match="another model"):
        kvfoundry.generate(model, tokenizer, PROMPTS[0], engine=DecodeEngine(tiny_model("qwen2")))


def test_the_plain_loop_is_the_default(tiny_model, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("kvfoundry.engine.choosing.decoder", lambda *_, **__: pytest.fail("the engine was chosen"))
    found = kvfoundry.generate(tiny_model("llama"), tokenizer, PROMPTS[0], max_new_tokens=3, details=True)
    assert found.notes == []


def test_rows_move_out_of_the_cache(tiny_model, tokenizer) -> None:
    """While the engine decodes, the cache holds nothing; a graph needs nothing but the engine's buffers."""
    model = tiny_model("llama")
    cache = KVCache(model, "snapkv(budget=8, window=4)")
    text = random_ids(1, 40)
    with torch.inference_mode():
        token = model(text, use_cache=True, past_key_values=cache).logits[:, -1:].argmax(-1)
        held, engine = cache.nbytes, DecodeEngine(model, room=1)
        program = engine.begin(cache, torch.cat([text, token], dim=1), 5)
        assert cache.nbytes == 0 < held <= engine.nbytes
        pointers = [tensor.data_ptr() for layer in program.cache.static for tensor in layer.tensors()]
        for _ in range(5):
            program.advance()
        assert pointers == [tensor.data_ptr() for layer in program.cache.static for tensor in layer.tensors()]
        engine.finish(cache, 5, keep=True)
    assert cache.seen_tokens == 45 and cache.kept_rows == 13
