"""The lm-evaluation-harness over our cache: with the full cache its own numbers, with a method those of the method."""

import json
import random
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from pages import commands_of, run_on_tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import kvfoundry
from kvfoundry.cli import main
from kvfoundry.compat import CACHE_ARGUMENT
from kvfoundry.errors import KVFoundryError

lm_eval = pytest.importorskip("lm_eval", reason="the lm-evaluation-harness is not installed (extra lm_eval)")
TASKS = Path(__file__).parent / "lm_eval_tasks"
WORDS = sorted(set(re.findall(r"\w+|[^\w\s]", (TASKS / "colours.jsonl").read_text())) | {f"w{i}" for i in range(60)})
SNAPKV = "snapkv(budget=8, window=4)"


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {word: number for number, word in enumerate(["[unk]", "[pad]", "[eos]", *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[unk]", pad_token="[pad]", eos_token="[eos]")


@pytest.fixture(scope="module")
def make_model(tokenizer):
    """Equal models, each its own: ours is attached, the harness' is not."""

    def make():
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, pad_token_id=1, eos_token_id=2, bos_token_id=None,
            initializer_range=0.2,
        )  # fmt: skip
        return LlamaForCausalLM(config).eval()

    return make


@pytest.fixture(scope="module")
def theirs(make_model, tokenizer):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=make_model(), tokenizer=tokenizer, batch_size=2)


@pytest.fixture(scope="module")
def ours(make_model, tokenizer):
    from kvfoundry.integrations.lm_eval import KVFoundryLM

    return partial(KVFoundryLM, make_model(), tokenizer=tokenizer)


def asked(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]


def text(words, seed):
    return " ".join(random.Random(seed).choices([word for word in WORDS if word.startswith("w")], k=words))


PAIRS = [
    (text(words, number), " " + text(said, 100 * number + said))
    for number, words in enumerate((40, 12, 40, 1))
    for said in (1, 3, 6)
] + [("", text(4, 7)), ("", text(2, 8)), (text(150, 9), " " + text(5, 10))]


def sums(answers):
    return torch.tensor([answer[0] for answer in answers])


@pytest.mark.parametrize(("batch_size", "piece"), [(1, 1), (3, 1), (3, 4)])
def test_the_full_cache_has_the_loglikelihoods_of_the_harness(theirs, ours, batch_size, piece):
    lm = ours(batch_size=batch_size, piece=piece)
    want = theirs.loglikelihood(asked("loglikelihood", PAIRS), disable_tqdm=True)
    found = lm.loglikelihood(asked("loglikelihood", PAIRS), disable_tqdm=True)
    torch.testing.assert_close(sums(found), sums(want), atol=1e-4, rtol=0)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in want]
    rolls = [(text(30, 1),), (text(200, 2),)]  # the second in two windows
    want = theirs.loglikelihood_rolling(asked("loglikelihood_rolling", rolls), disable_tqdm=True)
    found = lm.loglikelihood_rolling(asked("loglikelihood_rolling", rolls), disable_tqdm=True)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), atol=1e-3, rtol=0)


def test_greedy_is_what_the_model_would_say(ours, theirs):
    context = text(20, 3)
    (said,) = theirs.generate_until(asked("generate_until", [(context, {"until": [], "max_gen_toks": 4})]))
    other = " ".join(said.split()[:3]) + " w0 w1"
    answers = ours().loglikelihood(asked("loglikelihood", [(context, " " + said), (context, " " + other)]))
    assert [greedy for _, greedy in answers] == [True, False]


@pytest.mark.parametrize("method", [SNAPKV, "h2o(budget=6, window=2)", "kivi(bits=2, group=8, residual=0)"])
def test_a_method_is_scored_over_the_cache_that_it_leaves(ours, method, make_model, tokenizer):
    """As plain transformers has it: all but the last token of the context, then token by token."""
    answers = [ours(method=method, batch_size=size).loglikelihood(asked("loglikelihood", PAIRS)) for size in (1, 4)]
    torch.testing.assert_close(sums(answers[0]), sums(answers[1]), atol=1e-4, rtol=0)
    full = sums(ours().loglikelihood(asked("loglikelihood", PAIRS)))
    model = make_model()
    for number in (0, 1, 2, 5, 8):
        context, said = (tokenizer(part, return_tensors="pt").input_ids for part in PAIRS[number])
        cache, total = kvfoundry.KVCache(model, method), 0.0
        with torch.inference_mode():
            model(context[:, :-1], **{CACHE_ARGUMENT: cache})
            fed = context[:, -1:]
            for token in said[0]:
                logits = model(fed, **{CACHE_ARGUMENT: cache}).logits[0, -1]
                total += float(logits.log_softmax(-1)[token])
                fed = token[None, None]
        assert answers[0][number][0] == pytest.approx(total, abs=1e-4)
    assert (full - sums(answers[0]))[:9].abs().min() > 1e-3  # of each, also where one token is scored


def test_answers_are_those_of_the_harness_and_end_where_it_ends_them(theirs, ours):
    asks = [(text(words, words), {"until": ["w7", "w13 "], "max_gen_toks": 24}) for words in (30, 9, 18, 5)]
    asks += [(text(20, 6), {"until": [], "max_gen_toks": 3, "temperature": 0.0}), (text(200, 3), {"max_gen_toks": 3})]
    want = theirs.generate_until(asked("generate_until", asks), disable_tqdm=True)
    assert len({len(answer.split()) for answer in want}) > 1
    for size in (1, 3):
        assert ours(batch_size=size).generate_until(asked("generate_until", asks), disable_tqdm=True) == want
    stop = want[0].split()[1]
    cut = ours(batch_size=2).generate_until(
        asked("generate_until", [(asks[0][0], {"until": stop, "max_gen_toks": 24})])
    )
    assert cut == [want[0].partition(stop)[0]]
    changed = ours(method=SNAPKV).generate_until(asked("generate_until", asks), disable_tqdm=True)
    assert changed != want
    chunked = ours(method="fullkv", prefill_chunk=4).generate_until(asked("generate_until", asks), disable_tqdm=True)
    assert chunked == want


def test_the_record_says_what_was_stored(ours):
    lm = ours(method="streamingllm", budget=8)
    lm.loglikelihood(asked("loglikelihood", PAIRS[:3]), disable_tqdm=True)
    found = lm.get_model_info()["kvfoundry"]
    assert found["method"] == "streamingllm(budget=8)" and found["prompts"] == 1
    assert found["full_bytes"] == 39 * 2 * 2 * 2 * 8 * 4 and found["stored_bytes"] < found["full_bytes"] / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methd": "fullkv"}, "unknown model argument 'methd'; did you mean 'method'?"),
        ({"method": "snapvk"}, "unknown method 'snapvk'"),
        ({"batch_size": "auto"}, "batch_size 'auto' is not a number of prompts"),
        ({"piece": 0}, "piece=0 is not a number of tokens"),
        ({"tokenizer": None}, "a loaded model comes with its tokenizer"),
    ],
)
def test_bad_arguments_are_refused(ours, arguments, message):
    with pytest.raises(KVFoundryError, match=re.escape(message)):
        ours(**arguments)


@pytest.fixture
def task_folder(tmp_path, monkeypatch):
    """The tasks of lm_eval_tasks with their data, and a place of its own for what the harness caches."""
    import datasets
    import lm_eval.tasks

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    # Reading the names of its 14,000 own tasks takes the harness longer than all of this.
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for task in TASKS.glob("*.yaml"):
        (folder / task.name).write_text(task.read_text().replace("DATA", str(TASKS / "colours.jsonl")))
    return folder


def test_a_task_of_the_harness_runs_from_its_api(task_folder, theirs, ours, make_model, tokenizer):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    run = partial(
        simple_evaluate, tasks=["kvfoundry_colours", "kvfoundry_written"], bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(task_folder)),
    )  # fmt: skip
    want, found = run(model=theirs), run(model=ours(batch_size=2))
    assert found["results"] == want["results"]
    for task, samples in want["samples"].items():
        for left, right in zip(samples, found["samples"][task], strict=True):
            assert left["doc_id"] == right["doc_id"] and left["target"] == right["target"]
    folded = run(model=ours(method=SNAPKV))
    scores = [[answer[0][0] for answer in sample["resps"]] for sample in folded["samples"]["kvfoundry_colours"]]
    full = [[answer[0][0] for answer in sample["resps"]] for sample in found["samples"]["kvfoundry_colours"]]
    assert scores != full and folded["config"]["kvfoundry"]["method"] == SNAPKV


def test_the_command_runs_a_task(task_folder, make_model, tokenizer, tmp_path, capfd):
    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = ["lm-eval", "--model", str(tmp_path / "model"), "--method", "snapkv(window=4)", "--budget", "8"]
    words += [
        "--tasks",
        "kvfoundry_colours",
        "--include_path",
        str(task_folder),
        "--output_path",
        str(tmp_path / "out"),
    ]
    assert main([*words, "--limit", "3", "--batch_size", "2"]) == 0
    assert "kvfoundry_colours" in capfd.readouterr().out
    (written,) = (tmp_path / "out").rglob("results_*.json")
    record = json.loads(written.read_text())
    assert record["n-samples"]["kvfoundry_colours"]["effective"] == 3
    assert record["config"]["kvfoundry"]["method"] == SNAPKV and record["config"]["kvfoundry"]["prompts"] == 3


def test_the_commands_of_the_page_run(task_folder, make_model, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_model().save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("my_tasks").mkdir()
    colours = (task_folder / "colours.yaml").read_text()
    Path("my_tasks/colours.yaml").write_text(colours.replace("kvfoundry_colours", "my_colours"))
    commands = commands_of("lm_eval.md")
    for command in commands:
        run_on_tiny_model(command)
    assert commands and list(Path("results").rglob("results_*.json"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name the harness' tasks with --tasks"),
        (["--tasks", "colours"], "the harness says: Tasks not found: colours; --include_path adds"),
        (["--tasks", "kvfoundry_colours", "--no_such", "1"], "the harness says: unrecognized arguments: --no_such 1"),
        (["--tasks", "x", "--model_args", "pretrained=y"], "--model_args is made of --model and --method here"),
        (["--tasks", "x", "--method", "snapkv"], "snapkv: budget must be given"),
        (["--tasks", "x", "--method", "snapkv", "--budget", "8,9"], "the harness runs one model under one method"),
    ],
)
def test_bad_input_of_the_command_is_one_line(task_folder, capsys, words, message):
    assert main(["lm-eval", *words]) == 2
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if "INFO" not in line and "WARNING" not in line]
    assert line.startswith("error: ") and message in line


def test_brackets_keep_their_commas_in_model_args(make_model, tokenizer, tmp_path):
    from kvfoundry.integrations.lm_eval import KVFoundryLM

    make_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lm = KVFoundryLM.create_from_arg_string(f"pretrained={tmp_path},method={SNAPKV},piece=2", {"batch_size": 2})
    assert str(lm.method) == SNAPKV and lm.piece == 2 and lm.batch_size == 2
