"""LongBench: data as published, prompts of both kinds, the cut, and the command on a tiny model."""

import gzip
import hashlib
import json
import zipfile
from importlib.resources import files

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvfoundry.cli import main
from kvfoundry.errors import DataError, MissingExtraError
from kvfoundry.evaluate.prompts import cut_middle, encode_prompt, fit, kept_ends, line_stops
from kvfoundry.evaluate.results import META, REPORT, RESULTS, SUMMARY, read_lines
from kvfoundry.evaluate.runner import spread
from kvfoundry.evaluate.scores import extra
from kvfoundry.evaluate.tasks import longbench
from kvfoundry.evaluate.tasks.base import TaskError
from kvfoundry.evaluate.tasks.longbench import LongBenchTask
from kvfoundry.evaluate.tasks.longbench_data import folder_source, hub_source, load_data
from kvfoundry.evaluate.tasks.longbench_prompts import OWN_PROMPTS, load_prompts
from kvfoundry.evaluate.tasks.longbench_sets import DATA_SETS, ENGLISH, choose

LONG = "the river rose above the lower step and the roof began to leak . " * 60
CLASSES = ["river", "roof", "step"]


def record(number=0, **changes):
    """A sample in the published form."""
    return {
        "input": "Who saw the roof leak?", "context": LONG, "answers": ["the river", "the roof"],
        "length": 100 + 4000 * number, "dataset": "hotpotqa", "language": "en", "all_classes": None,
        "_id": f"id{number}",
    } | changes  # fmt: skip


def write(path, records):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in records), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write(data / "hotpotqa.jsonl", [record(number) for number in range(3)])
    trec = [record(number, input="Type:", answers=["roof"], all_classes=CLASSES) for number in range(2)]
    (data / "trec.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, trec)).encode()))
    write(data / "samsum.jsonl", [record(input="Dialogue: the roof\nSummary: ", _id=None)])
    write(data / "hotpotqa_e.jsonl", [record(number, _id="same") for number in range(3)])
    return data


@pytest.fixture(scope="module")
def letters():
    """One token per byte, so that a text comes back as it was, and a chat template of eight tokens."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    template = "{% for message in messages %}<u>{{ message['content'] }}</u>{% endfor %}\n"
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template)


def task_of(folder, name, **more):
    return LongBenchTask(
        DATA_SETS[name], load_data(DATA_SETS[name], folder_source(folder)), load_prompts(None, []), **more
    )


# --- data sets and data -----------------------------------------------------------------------------------------------


def test_choice_of_data_sets():
    assert len(ENGLISH) == 16 and len(DATA_SETS) == 21
    assert [data_set.name for data_set in choose([])] == list(ENGLISH)
    assert [data_set.name for data_set in choose(["trec", "lsht", "trec"])] == ["trec", "lsht"]
    assert len(choose(["all"])) == 21 and len(choose([], e=True)) == len(choose(["all"], e=True)) == 13
    with pytest.raises(TaskError, match="did you mean 'hotpotqa'"):
        choose(["hotpot"])
    with pytest.raises(TaskError, match="unknown LongBench-E data set 'musique'"):
        choose(["musique"], e=True)


def test_samples_are_read_as_published(folder):
    data = load_data(DATA_SETS["hotpotqa"], folder_source(folder))
    assert [sample.item for sample in data.samples] == ["id0", "id1", "id2"]
    assert data.samples[2].length == 8100 and data.samples[0].answers == ("the river", "the roof")
    assert load_data(DATA_SETS["trec"], folder_source(folder)).samples[0].all_classes == tuple(CLASSES)
    assert load_data(DATA_SETS["samsum"], folder_source(folder)).samples[0].item == "1"
    e = load_data(DATA_SETS["hotpotqa"], folder_source(folder), e=True)
    assert e.path.name == "hotpotqa_e.jsonl" and [sample.item for sample in e.samples] == ["1", "2", "3"]


def test_a_length_that_is_not_given_is_counted_in_words_or_characters(tmp_path):
    write(tmp_path / "musique.jsonl", [record(length=None, context="a b c", input="d?", answers=["e f"])])
    write(tmp_path / "dureader.jsonl", [record(length=None, context="水稻 小麦", input="何?", answers=["玉米"])])
    source = folder_source(tmp_path)
    assert load_data(DATA_SETS["musique"], source).samples[0].length == 6
    assert load_data(DATA_SETS["dureader"], source).samples[0].length == 9


def test_classes_that_lie_with_the_answers(tmp_path):
    nested = record(input="Type:", answers=[{"all_classes": CLASSES, "answers": ["roof"]}])
    write(tmp_path / "trec.jsonl", [nested])
    sample = load_data(DATA_SETS["trec"], folder_source(tmp_path)).samples[0]
    assert (sample.answers, sample.all_classes) == (("roof",), tuple(CLASSES))


@pytest.mark.parametrize(
    ("name", "changes", "fault"),
    [
        ("hotpotqa", {"context": None}, "line 2 has no text in field 'context'"),
        ("hotpotqa", {"context": " "}, "empty context"),
        ("hotpotqa", {"input": ""}, "nothing in field 'input'"),
        ("hotpotqa", {"input": 3}, "no text in field 'input'"),
        ("hotpotqa", {"answers": []}, "no list of texts in field 'answers'"),
        ("hotpotqa", {"answers": "roof"}, "no list of texts in field 'answers'"),
        ("trec", {"all_classes": None}, "no list of texts in field 'all_classes'"),
        ("passage_retrieval_en", {"answers": ["the third"]}, "names no paragraph"),
    ],
)
def test_a_damaged_record_is_named_and_skipped_on_demand(tmp_path, name, changes, fault):
    good = record(answers=["Paragraph 3"], all_classes=CLASSES)
    write(tmp_path / f"{name}.jsonl", [good, good | changes])
    with pytest.raises(DataError, match=f"{fault}.*--skip-damaged"):
        load_data(DATA_SETS[name], folder_source(tmp_path))
    data = load_data(DATA_SETS[name], folder_source(tmp_path), skip_damaged=True)
    assert len(data.samples) == 1 and fault in data.damaged[0]
    write(tmp_path / f"{name}.jsonl", [good | changes])
    with pytest.raises(DataError, match="no usable record"):
        load_data(DATA_SETS[name], folder_source(tmp_path), skip_damaged=True)


def test_code_may_lie_in_the_context_alone(tmp_path):
    write(tmp_path / "repobench-p.jsonl", [record(input="")])
    assert load_data(DATA_SETS["repobench-p"], folder_source(tmp_path)).samples[0].given == ""


def test_the_archive_of_the_hub(folder, tmp_path, monkeypatch):
    asked = []

    def fetch(repository, name, repo_type, local_files_only=False):
        asked.append((repository, name, repo_type, local_files_only))
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.write(folder / "hotpotqa.jsonl", "data/hotpotqa.jsonl")
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: asked.append(url))
    source = hub_source()
    from_hub, from_folder = (load_data(DATA_SETS["hotpotqa"], each) for each in (source, folder_source(folder)))
    assert from_hub.samples == from_folder.samples and from_hub.digest == from_folder.digest
    with pytest.raises(DataError, match=r"trec.jsonl is not in the archive .* --data-dir"):
        load_data(DATA_SETS["trec"], source)
    place = ("THUDM/LongBench", "data.zip", "dataset")
    assert asked[0] == (*place, True) and asked[1].endswith("/data.zip") and asked[2:] == [(*place, False)]


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_our_prompts_serve_every_data_set_and_are_a_version():
    prompts = load_prompts(None, choose(["all"]))
    for data_set in DATA_SETS.values():
        text = prompts.fill(data_set, "CONTEXT {x}", "GIVEN {y}")
        assert text.count("CONTEXT {x}") == 1 and text.count("GIVEN {y}") == int(data_set.takes_input)
        assert text.endswith(prompts.after_context(data_set, "GIVEN {y}"))
        assert not prompts.is_published(data_set)
        assert "do not compare with published" in prompts.note(data_set)
    raw = files("kvfoundry.evaluate").joinpath("data/longbench_prompts.json").read_bytes()
    digest = hashlib.sha256(raw).hexdigest()[:16]
    # Another wording needs another version: results under the old one do not compare with new ones.
    assert (OWN_PROMPTS, digest) == ("kvfoundry-1", "1de6942db413c7c2")


def test_a_file_of_prompts(tmp_path, monkeypatch):
    path = tmp_path / "mine.json"
    template = "{context} {{}} {input}"
    path.write_text(json.dumps({"hotpotqa": template, "lcc": "{context}"}))
    prompts = load_prompts(path, choose(["hotpotqa"]))
    assert prompts.fill(DATA_SETS["hotpotqa"], "a", "b") == "a {} b" and prompts.source == "mine.json"
    assert "not the published wording" in prompts.note(DATA_SETS["hotpotqa"])
    published = DATA_SETS["hotpotqa"].__class__(**vars(DATA_SETS["hotpotqa"]) | {
        "published": hashlib.sha256(template.encode()).hexdigest()
    })  # fmt: skip
    assert prompts.is_published(published) and prompts.note(published) == "prompts of mine.json: the published wording"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no prompts"),
        ("{}", "holds no prompts"),
        ({"hotpot": "{context}{input}"}, "did you mean 'hotpotqa'"),
        ({"hotpotqa": "{context}{input}{answers}"}, "unknown field {answers}"),
        ({"hotpotqa": "{context}{input.real}"}, "unknown field {input.real}"),
        ({"hotpotqa": "{context}{}"}, "unknown field {}"),
        ({"hotpotqa": "{context}{input!r}"}, "formats a field"),
        ({"hotpotqa": "{context}{input"}, "cannot be filled"),
        ({"hotpotqa": "{context}"}, "does not use {input}"),
        ({"hotpotqa": "{input}"}, "does not use {context}"),
        ({"hotpotqa": "{context}{context}{input}"}, "more than once"),
        ({"hotpotqa": 3}, "not a string"),
        ({"lcc": "{context}"}, "no prompt for hotpotqa"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_used(tmp_path, content, message):
    path = tmp_path / "prompts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError) as caught:
        load_prompts(path, choose(["hotpotqa"]))
    assert message in str(caught.value) and "\n" not in str(caught.value)


# --- the cut ----------------------------------------------------------------------------------------------------------


def test_half_of_what_is_kept_is_head_and_half_tail(letters):
    assert kept_ends(10, 10) == (10, 0) and kept_ends(11, 10) == (5, 5) and kept_ends(11, 9) == (4, 4)
    assert cut_middle(letters, LONG, 101) == LONG[:50] + LONG[-50:]
    assert cut_middle(letters, "the roof", 8) == "the roof"
    with pytest.raises(DataError, match="at least 2"):
        cut_middle(letters, LONG, 1)


@pytest.mark.parametrize(("chat", "around"), [(True, 8), (False, 0)])
def test_a_prompt_fits_with_its_template(letters, chat, around):
    assert fit(letters, LONG, chat, 90) == LONG[: (90 - around) // 2] + LONG[-((90 - around) // 2) :]
    assert fit(letters, "the roof", chat, 90) == "the roof"


def test_a_cut_that_grows_in_the_round_trip_is_made_smaller(letters):
    """Half a letter of two bytes is decoded as a mark of three."""
    text = "é" * 100
    assert len(encode_prompt(letters, cut_middle(letters, text, 42), False)) > 42
    assert 36 <= len(encode_prompt(letters, fit(letters, text, False, 42), False)) <= 42


def test_items_follow_the_rule_of_their_data_set(folder, letters):
    pytest.importorskip("rouge")
    hotpot = task_of(folder, "hotpotqa", positions=600).items(letters, True, 0)
    assert {len(encode_prompt(letters, item.prompt, True)) for item in hotpot} <= {600 - 33, 600 - 32}
    assert all(item.chat is None and item.max_new_tokens == 32 and item.cell["cut"] for item in hotpot)
    assert [item.cell["bucket"] for item in hotpot] == ["0-4k", "4-8k", "8k+"]
    assert hotpot[0].prompt.endswith(hotpot[0].question) and "Who saw the roof leak" in hotpot[0].question
    trec = task_of(folder, "trec", positions=600).items(letters, True, 0)
    # Not wrapped, so the whole room is the prompt's.
    assert {len(encode_prompt(letters, item.prompt, False)) for item in trec} == {600 - 64}
    assert all(item.chat is False and not item.line_ends for item in trec)
    assert task_of(folder, "samsum").items(letters, True, 0)[0].line_ends


def test_the_published_length_leaves_the_template_out(folder, letters):
    item = task_of(folder, "hotpotqa", max_length=200, positions=300).items(letters, True, 0)[0]
    assert len(encode_prompt(letters, item.prompt, False)) == 200
    whole = task_of(folder, "hotpotqa").items(letters, True, 0)[0]
    assert not whole.cell["cut"] and LONG in whole.prompt
    with pytest.raises(TaskError, match="at least 2"):
        task_of(folder, "hotpotqa", max_length=1)


def test_a_cut_that_takes_part_of_the_question_leaves_its_end(folder, letters):
    item = task_of(folder, "hotpotqa", max_length=20).items(letters, False, 0)[0]
    assert item.prompt.endswith(item.question) and item.question.endswith("k?\nAnswer:")


def test_only_the_items_that_are_asked_for_are_cut(folder, letters, monkeypatch):
    task = task_of(folder, "hotpotqa", positions=600)
    cut = []
    monkeypatch.setattr(longbench, "fit", lambda tokenizer, text, chat, most: cut.append(text) or text)
    assert [item.item for item in spread(task.items(letters, True, 0), 2)] == ["id0", "id1"] and len(cut) == 2
    assert [item.item for item in task.items(letters, True, 0)[1:]] == ["id1", "id2"] and len(cut) == 4


def test_scores_by_the_rule_of_the_data_set(folder, letters):
    trec = task_of(folder, "trec")
    item = trec.items(letters, False, 0)[0]
    assert trec.score(item, "\nroof\nriver") == (1.0, True) and trec.score(item, "roof or river") == (0.5, False)
    hotpot = task_of(folder, "hotpotqa")
    assert hotpot.score(hotpot.items(letters, False, 0)[0], "a roof") == (1.0, True)


def test_a_missing_library_stops_before_anything_runs(folder, monkeypatch):
    monkeypatch.setattr(extra, "is_installed", lambda module: False)
    assert task_of(folder, "hotpotqa").name == "longbench_hotpotqa"  # needs none
    with pytest.raises(MissingExtraError, match=r"score of samsum needs the package rouge.*kvfoundry\[eval\]"):
        task_of(folder, "samsum")


# --- generation and the command ---------------------------------------------------------------------------------------


def test_a_line_break_ends_the_answer_but_does_not_begin_it(model):
    class Breaks:
        def __call__(self, text, add_special_tokens):
            assert text == "\n" and not add_special_tokens
            return {"input_ids": [17]}

    assert line_stops(model, Breaks()) == {"eos_token_id": [2, 17], "min_new_tokens": 1}


@pytest.fixture
def call(capsys):
    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_the_command(call, folder, model_folder, tmp_path):
    arguments = [
        "eval", "longbench", "--data-dir", folder, "--datasets", "hotpotqa,trec", "--datasets", "trec",
        "--model", model_folder, "--method", "fullkv", "--method", "snapkv(window=8)", "--budget", 32,
        "--hide-question", "--eval-batch-size", 2, "--out", tmp_path / "out",
    ]  # fmt: skip
    status, out, err = call(*arguments, "--json")
    assert status == 0 and "note: prompts of kvfoundry-1: not the published wording" in err
    rows = {(row["task"], row["method"]): row for row in json.loads(out)["rows"]}
    assert {task for task, _ in rows} == {"longbench_hotpotqa", "longbench_trec"} and len(rows) == 4
    row = rows["longbench_hotpotqa", "fullkv"]
    assert row["items"] == 3
    assert row["task_notes"] == [
        "prompts of kvfoundry-1: not the published wording, so scores do not compare with published ones"
    ]
    assert row["published_form"].keys() == {"score", "0-4k", "4-8k", "8k+"}
    lines = read_lines(tmp_path / "out" / RESULTS)
    assert all(line["prompt_tokens"] <= 512 - 32 and line["cut"] for line in lines)
    assert all(line["kept_rows"] < line["prompt_tokens"] for line in lines if line["method"] != "fullkv")
    record = json.loads((tmp_path / "out" / META).read_text())["arguments"]["tasks"][0]
    assert record["prompts"] == "kvfoundry-1" and record["published_prompt"] is False and record["samples"] == 3
    assert json.loads((tmp_path / "out" / SUMMARY).read_text())["rows"]
    page = (tmp_path / "out" / REPORT).read_text()
    assert "What to know of the tasks" in page and "scores do not compare with published ones" in page
    status, out, err = call(*arguments, "--resume")
    assert status == 0 and "score in %" in out and "4-8k" in out


def test_the_command_on_longbench_e_with_prompts_of_a_file(call, folder, model_folder, tmp_path):
    (tmp_path / "p.json").write_text(json.dumps({"hotpotqa": "{context}\n{input}"}))
    status, _, err = call(
        "eval", "longbench", "--data", folder, "--datasets", "hotpotqa", "--e", "--prompts", tmp_path / "p.json",
        "--max-length", 64, "--model", model_folder, "--limit", 2, "--out", tmp_path / "out",
    )  # fmt: skip
    assert status == 0 and "prompts of p.json: not the published" in err
    lines = read_lines(tmp_path / "out" / RESULTS)
    assert [line["task"] for line in lines] == ["longbench_hotpotqa_e"] * 2
    assert [line["bucket"] for line in lines] == ["0-4k", "4-8k"]


def test_bad_input_is_one_line(call, folder, tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("no route to the hub\nat all")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    write(tmp_path / "musique.jsonl", [record(), record(answers=None)])
    for message, *arguments in (
        ("cannot be fetched from the hub (THUDM/LongBench: no route to the hub)", "--datasets", "hotpotqa"),
        ("did you mean 'hotpotqa'", "--datasets", "hotpotaq"),
        ("does not exist", "--datasets", "trec", "--data-dir", tmp_path / "none"),
        ("no musique.jsonl or musique.jsonl.gz", "--datasets", "musique", "--data-dir", folder),
        ("no trec_e.jsonl", "--datasets", "trec", "--data-dir", folder, "--e"),
        ("line 2 has no list of texts in field 'answers'", "--datasets", "musique", "--data-dir", tmp_path),
        ("cannot be read", "--datasets", "hotpotqa", "--prompts", tmp_path / "none.json"),
        ("at least 2 tokens", "--datasets", "hotpotqa", "--data-dir", folder, "--max-length", 0),
    ):
        status, out, err = call("eval", "longbench", *arguments, "--out", tmp_path / "out")
        assert status == 2 and message in err and err.count("\n") == 1 and not out, (arguments, err)


def test_what_is_skipped_is_said(call, folder, model_folder, tmp_path):
    (folder / "hotpotqa.jsonl").write_text(json.dumps(record()) + "\n{torn\n")
    status, _, err = call(
        "eval", "longbench", "--data-dir", folder, "--datasets", "hotpotqa", "--skip-damaged",
        "--model", model_folder, "--out", tmp_path / "out",
    )  # fmt: skip
    assert status == 0 and "note: 1 damaged record of" in err and "line 2 is not JSON" in err
