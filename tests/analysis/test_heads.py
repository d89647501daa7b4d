"""Head tables: against the attention that the model itself reports, and what is saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

import kvfoundry
from kvfoundry.analysis.heads import _score, measure_heads
from kvfoundry.analysis.probes import Probe, make_probes
from kvfoundry.cli.analyze import analyze_app
from kvfoundry.errors import DataError, KVFoundryError, SpecError
from kvfoundry.method import Method

SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=300, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    initializer_range=0.2,
)  # fmt: skip


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and a start token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<pad>": 0, "<bos>": 1} | {letter: i + 2 for i, letter in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=words, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def build(config: Any) -> PreTrainedModel:
    torch.manual_seed(11)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return build(LlamaConfig(**SIZES))


@pytest.mark.parametrize("variant", ["retrieval", "reasoning"])
def test_a_probe_knows_the_rows_of_its_needle(variant: str, tokenizer: PreTrainedTokenizerFast) -> None:
    for probe in make_probes(tokenizer, variant, tokens=700, count=5, seed=3):  # type: ignore[arg-type]
        assert len(probe.prompt) + len(probe.answer) <= 700 and probe.prompt[0] == 1
        text, answer = tokenizer.decode(probe.prompt[1:]), tokenizer.decode(probe.answer)
        counted = "".join(tokenizer.decode([probe.prompt[row]]) for row in probe.rows)
        start = probe.rows[0] - 1
        assert counted == text[start : start + len(counted)] and answer in counted
        assert text.endswith("secret words of the " + text.rsplit(" the ", 1)[1]) and text.count(answer) == 1
        if variant == "reasoning":
            assert counted.startswith(" A guest overheard them")
            assert text[start - 30 : start].endswith(".") and "secret words" in text[start - 90 : start]
        # The needle is where the depth says, up to one sentence.
        assert abs(start / text.index("\n\nQuestion") - probe.depth) < 0.35


def test_probes_depend_on_the_seed_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    one, same, other = (make_probes(tokenizer, "retrieval", tokens=500, count=3, seed=seed) for seed in (1, 1, 2))
    assert one == same and one != other


def expected(model: PreTrainedModel, probe: Probe, measure: str) -> torch.Tensor:
    """[layers, heads] from the attention maps that a plain model reports for the whole text at once."""
    ids = torch.tensor([[*probe.prompt, *probe.answer]])
    with torch.no_grad():
        maps = torch.stack(model(ids, output_attentions=True).attentions)[:, 0]  # [layers, heads, queries, rows]
    n, total = len(probe.rows), torch.zeros(maps.shape[:2])
    for step, token in enumerate(probe.answer):
        query = len(probe.prompt) - 1 + step
        weights = maps[:, :, query, : query + 1]
        for layer in range(maps.shape[0]):
            for head in range(maps.shape[1]):
                ranked = weights[layer, head].argsort(descending=True).tolist()
                if measure == "copy":
                    total[layer, head] += float(ranked[0] in probe.rows and probe.prompt[ranked[0]] == token)
                else:
                    rows = set(probe.rows) & set(ranked[:n]) if measure == "top" else probe.rows
                    total[layer, head] += sum(float(weights[layer, head, row]) for row in rows)
    return total / len(probe.answer)


@pytest.mark.parametrize("measure", ["top", "mass", "copy"])
def test_scores_are_those_of_the_models_own_attention(
    measure: str, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    probes = make_probes(tokenizer, "reasoning", tokens=600, count=3, seed=5)
    wanted = torch.stack([expected(llama, probe, measure) for probe in probes]).mean(dim=0)
    found = measure_heads(llama, tokenizer, variant="reasoning", measure=measure, tokens=600, probes=3, seed=5)  # type: ignore[arg-type]
    assert set(found.scores) == {0, 1}
    torch.testing.assert_close(torch.tensor(found.table), wanted, rtol=1e-4, atol=1e-6)
    assert measure == "copy" or float(wanted.min()) > 0


def test_one_step_by_hand() -> None:
    """Rows 1 and 3 are the needle, row 3 holds the token."""
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.3, 0.1, 0.1], [0.0, 0.6, 0.2, 0.2]])
    rows, holds = torch.tensor([1, 3]), torch.tensor([False, True])
    assert _score(weights, rows, holds, "mass").tolist() == pytest.approx([0.6, 0.4, 0.8])
    assert _score(weights, rows, holds, "top").tolist() == pytest.approx([0.4, 0.3, 0.8])  # 0.2 ties with row 2
    assert _score(weights, rows, holds, "copy").tolist() == [1.0, 0.0, 0.0]


def test_a_head_that_finds_the_token_scores_one(tokenizer: PreTrainedTokenizerFast) -> None:
    """At every step all weight is on the needle row that holds the token being written: a perfect copying head."""
    probe = make_probes(tokenizer, "retrieval", tokens=500, count=1, seed=0)[0]
    answer_rows = [row for row in probe.rows if probe.prompt[row] in probe.answer]
    total = torch.zeros(1)
    for token in probe.answer:
        weights = torch.zeros(1, len(probe.prompt))
        weights[0, next(row for row in answer_rows if probe.prompt[row] == token)] = 1.0
        holds = torch.tensor([probe.prompt[row] == token for row in probe.rows])
        total += _score(weights, torch.tensor(probe.rows), holds, "copy")
    assert float(total) == len(probe.answer)


def test_the_model_is_left_as_it_was(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    def hooks() -> list[int]:
        return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in llama.modules()]

    ids = torch.arange(2, 90)[None]
    with torch.no_grad():
        before = llama(ids).logits
    hooked = hooks()
    measure_heads(llama, tokenizer, tokens=500, probes=1)
    assert llama.config._attn_implementation == "eager"
    assert hooks() == hooked
    with torch.no_grad():
        assert torch.equal(llama(ids).logits, before)


def test_saved_in_the_published_form_and_read_by_headkv(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    scores, again = (measure_heads(llama, tokenizer, tokens=500, probes=2, seed=4) for _ in range(2))
    assert scores == again
    beside = scores.save(tmp_path / "heads.json")
    table = json.loads((tmp_path / "heads.json").read_text(encoding="utf-8"))
    assert list(table) == [f"{layer}-{head}" for layer in range(2) for head in range(4)]
    assert table["1-2"] == scores.scores[1][2]
    about = json.loads(beside.read_text(encoding="utf-8"))
    assert about["variant"] == "retrieval" and about["seed"] == 4 and about["layers"] == [0, 1] and about["heads"] == 4
    best = scores.best(3)
    assert best[0][2] == max(table.values()) and table[f"{best[0][0]}-{best[0][1]}"] == best[0][2]
    cache = kvfoundry.KVCache(llama, f"headkv(budget=20, window=4, table={str(tmp_path / 'heads.json')!r})")
    with torch.no_grad():
        llama(torch.arange(2, 92)[None], None, None, cache)
    assert 19 < cache.kept_rows <= 20


def test_a_hybrid_model_has_a_table_of_its_full_layers(tokenizer: PreTrainedTokenizerFast) -> None:
    kinds = ["sliding_attention", "full_attention"]
    model = build(Gemma3TextConfig(**SIZES, sliding_window=32, layer_types=kinds))
    scores = measure_heads(model, tokenizer, tokens=500, probes=1)
    assert set(scores.scores) == {1}
    cache = kvfoundry.KVCache(model, f"headkv(budget=20, window=4, table={scores.table})")
    with torch.no_grad():
        model(torch.arange(2, 92)[None], None, None, cache)
    assert 19 < cache.kept_rows <= 20
    whole = kvfoundry.KVCache(model, f"headkv(budget=20, window=4, table={((9.0,) * 4, *scores.table)})")
    with torch.no_grad():
        model(torch.arange(2, 92)[None], None, None, whole)
    assert torch.equal(whole.attention_layers[1].positions, cache.attention_layers[1].positions)


def test_only_answered_probes_count(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="answered none of 2 probes"):
        measure_heads(llama, tokenizer, tokens=500, probes=2, answers="generated")


def test_a_model_that_answers_is_measured_on_its_own_words(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the model's own greedy answer as the right one, generated and forced are the same measurement."""
    probe = make_probes(tokenizer, "retrieval", tokens=500, count=1, seed=0)[0]
    with torch.no_grad():
        ids = torch.tensor([probe.prompt])
        for _ in range(4):
            ids = torch.cat([ids, llama(ids).logits[:, -1:].argmax(dim=-1)], dim=1)
    own = Probe(probe.prompt, tuple(ids[0, len(probe.prompt) :].tolist()), probe.rows, probe.depth)
    monkeypatch.setattr("kvfoundry.analysis.heads.make_probes", lambda *args, **kwargs: [own])
    generated, forced = (
        measure_heads(llama, tokenizer, tokens=500, probes=1, answers=answers)  # type: ignore[arg-type]
        for answers in ("generated", "forced")
    )
    assert generated.scores == forced.scores and generated.about["answer_tokens_right"] == 1.0


@pytest.mark.parametrize(
    "given, message",
    [
        ({"variant": "recall"}, "variant must be one of retrieval, reasoning"),
        ({"measure": "sum"}, "measure must be one of top, mass, copy"),
        ({"answers": "free"}, "answers must be one of forced, generated"),
        ({"probes": 0}, "probes must be a whole number of at least 1"),
        ({"tokens": 100}, "tokens=100 is too few for a needle"),
        ({"tokens": 5000}, "tokens=5000 is more than the 1024 positions of LlamaForCausalLM"),
    ],
)
def test_refused(
    given: dict[str, Any], message: str, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(KVFoundryError, match=message):
        measure_heads(llama, tokenizer, **{"tokens": 500, "probes": 1, **given})


def test_a_model_without_full_attention_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build(Gemma3TextConfig(**SIZES, sliding_window=32, layer_types=["sliding_attention"] * 2))
    with pytest.raises(SpecError, match="no full-attention layer"):
        measure_heads(model, tokenizer, tokens=500, probes=1)


def test_the_command(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvfoundry, "load", lambda *args, **kwargs: (llama, tokenizer), raising=False)
    path = tmp_path / "heads.json"
    arguments = [
        "heads",
        "--model",
        "tiny",
        "--tokens",
        "500",
        "--probes",
        "2",
        "--seed",
        "7",
        "--variant",
        "reasoning",
    ]
    result = CliRunner().invoke(analyze_app, [*arguments, "--out", str(path)], catch_exceptions=False)
    assert result.exit_code == 0 and "layer" in result.output and "heads.meta.json" in result.output
    wanted = measure_heads(llama, tokenizer, variant="reasoning", tokens=500, probes=2, seed=7)
    assert Method.parse(f"headkv(budget=64, table={str(path)!r})").budget.table.scores == wanted.table  # type: ignore[union-attr]
    missing = CliRunner().invoke(analyze_app, [*arguments, "--out", str(tmp_path / "none" / "heads.json")])
    assert isinstance(missing.exception, DataError) and "its folder does not exist" in str(missing.exception)
