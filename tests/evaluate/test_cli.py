"""The command: what it prints, its exit status, and one line for every kind of bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields

import pytest
import typer

import kvfoundry
from kvfoundry.cli import main
from kvfoundry.cli.evaluation import eval_app
from kvfoundry.cli.evaluation.playground import PlaygroundWords
from kvfoundry.evaluate.results import META, REPORT, RESULTS, read_lines
from kvfoundry.evaluate.tasks.ruler.table import VARIANTS

NIAH = ["eval", "niah", "--lengths", "120", "--depths", "0,100", "--max-new-tokens", "2"]
RULER = ["eval", "ruler"]
TASKS = [info.callback.__name__ for info in eval_app.registered_commands]


@pytest.fixture
def call(capsys):
    """Run a command in this process; (status, stdout, stderr)."""

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def in_process(*arguments, prelude=""):
    program = f"import sys; {prelude}\nfrom kvfoundry.cli import main\nsys.exit(main())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell starts what runs in the background deaf to Ctrl-C, and its children would be too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["eval", "--help"],
        *(["eval", task, "--help"] for task in TASKS),
        ["run", "--help"],
        ["report", "--help"],
        ["pick", "--help"],
        ["lm-eval", "--help"],
        ["--version"],
        [],
    ],
)
def test_help_works_where_torch_does_not(arguments):
    process = in_process(*arguments, prelude="sys.modules['torch'] = None; sys.modules['transformers'] = None")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == ""
    assert kvfoundry.__version__ in out if arguments == ["--version"] else "Usage: kvfoundry" in out


@pytest.mark.parametrize("task", TASKS)
def test_every_task_shows_the_shared_options(task):
    command = typer.main.get_command(eval_app).commands[task]
    shown = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert shown >= {
        "--model", "--method", "--budget", "--limit", "--eval-batch-size", "--eval_batch_size", "--chat", "--no-chat",
        "--prefill-chunk", "--hide-question", "--seed", "--out", "--resume", "--device", "--dtype", "--json",
        "--save_dir", *(f"--{field.name}" for field in fields(PlaygroundWords)),
    }  # fmt: skip
    assert next(parameter.default for parameter in command.params if parameter.name == "out").name == task


def test_methods_lists_every_method(call):
    status, out, _ = call("methods", "--json")
    listing = json.loads(out)
    assert status == 0 and listing.keys() == kvfoundry.methods().keys()
    assert listing["snapkv"]["parameters"]["budget"] == {"required": True}
    assert listing["snapkv"]["parameters"]["window"] == {"default": 32}
    status, out, _ = call("methods")
    assert status == 0 and all(name in out for name in listing)
    assert call("methods", "snapkv", "--json")[1].startswith('{\n "snapkv"')


def test_run_prints_the_answer_and_the_cost(call, model_folder):
    status, out, err = call("run", "the river rose", "--model", model_folder, "--max-new-tokens", 3, "--no-chat")
    assert status == 0 and out.strip() and "3 + 3 tokens, cache" in err


def test_run_says_what_is_parked_on_the_host(call, model_folder):
    arguments = ("run", "the roof began to leak", "--model", model_folder, "--max-new-tokens", 2, "--no-chat")
    status, _, err = call(*arguments, "--method", "snapkv(budget=3, window=2)+park()")
    assert status == 0 and "MiB in host memory" in err and "recall() brings them back" in err
    assert "parked" not in call(*arguments, "--method", "snapkv(budget=3, window=2)")[2]


def test_run_crosses_methods_and_budgets_over_a_file(call, model_folder, tmp_path):
    (tmp_path / "prompts.txt").write_text("the river rose\n\nthe roof began to leak\n")
    status, out, _ = call(
        "run", "--file", tmp_path / "prompts.txt", "--model", model_folder, "--method", "fullkv",
        "--method", "streamingllm", "--budget", "16,0.5",
        "--max-new-tokens", 2, "--json", "--eval_batch_size", 2,
    )  # fmt: skip
    records = json.loads(out)
    assert status == 0
    assert [(record["method"], record["prompt"]) for record in records] == [
        (method, prompt)
        for method in ("fullkv", "streamingllm(budget=16)", "streamingllm(budget=0.5)")
        for prompt in ("the river rose", "the roof began to leak")
    ]


def test_stream_prints_the_same_answer(call, model_folder):
    arguments = ("run", "the river rose", "--model", model_folder, "--max-new-tokens", 4)
    assert call(*arguments)[1].split() == call(*arguments, "--stream")[1].split()


def test_eval_niah_end_to_end_and_resumed(call, model_folder, tmp_path):
    out = tmp_path / "out"
    arguments = [
        *NIAH,
        "--model",
        model_folder,
        "--method",
        "fullkv",
        "--method",
        "snapkv(window=8)",
        "--budget",
        "32",
        "--out",
        out,
    ]
    status, text, _ = call(*arguments)
    assert status == 0 and "snapkv" in text and (out / REPORT).exists()
    before = (out / RESULTS).read_bytes()
    assert len(read_lines(out / RESULTS)) == 4
    (out / RESULTS).write_bytes(before[:-30])
    status, text, _ = call(*arguments, "--resume", "--json")
    assert status == 0 and len(read_lines(out / RESULTS)) == 4
    assert {row["method"] for row in json.loads(text)["rows"]} == {"fullkv", "snapkv(budget=32, window=8)"}


@pytest.fixture(scope="module")
def longer_model(model_folder, tmp_path_factory):
    """The tiny model with room for a few more tokens."""
    folder = tmp_path_factory.mktemp("longer") / "model"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 640}))
    return folder


def test_eval_niah_in_its_published_form(call, model_folder, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rouge_score")
    status, out, err = call(
        "eval", "niah", "--s_len", 120, "--e_len", 210, "--step", 40, "--depth-intervals", 3, "--placement", "stop",
        "--score", "rouge", "--max-new-tokens", 2, "--model", model_folder, "--plot", "svg", "--out", tmp_path / "out",
        "--json",
    )  # fmt: skip
    assert status == 0, err
    lines = read_lines(tmp_path / "out" / RESULTS)
    assert {(line["length"], line["depth"]) for line in lines} == {
        (n, d) for n in (120, 160, 200) for d in (0, 50, 100)
    }
    assert all(line["references"][0].startswith("Remember this") for line in lines)
    assert json.loads(out)["picture"].endswith("niah.svg") and (tmp_path / "out" / "niah.svg").stat().st_size > 1000


def test_eval_ruler_end_to_end(call, longer_model, tmp_path):
    status, out, err = call(
        *RULER, "--tasks", "vt,fwe", "--tasks", "vt", "--lengths", "500,560", "--items", 1, "--eval-batch-size", 2,
        "--model", longer_model, "--method", "fullkv", "--method", "snapkv(window=8)", "--budget", 64,
        "--out", tmp_path, "--json", "--hide-question",
    )  # fmt: skip
    assert status == 0, err
    assert {(row["task"], row["items"]) for row in json.loads(out)["rows"]} == {("ruler_vt", 2), ("ruler_fwe", 2)}
    lines = read_lines(tmp_path / RESULTS)
    assert len(lines) == 8 and all(line["prompt_tokens"] + 30 <= line["length"] for line in lines)


def test_eval_ruler_asks_every_task_that_needs_no_data(call, longer_model, tmp_path, monkeypatch):
    def failing(*args, **kwargs):
        raise RuntimeError("not asked")

    monkeypatch.setattr(kvfoundry, "generate", failing)
    status, _, _ = call(*RULER, "--lengths", 560, "--items", 1, "--model", longer_model, "--out", tmp_path)
    tasks = [line["task"] for line in read_lines(tmp_path / RESULTS)]
    assert status == 1 and tasks == [f"ruler_{name}" for name in VARIANTS if not name.startswith("qa")]


def test_eval_ruler_asks_the_questions_of_a_file_and_leaves_damaged_ones_out(call, model_folder, tmp_path):
    good = {
        "question": "Where is the mill?", "answer": "by the river", "supporting_facts": [["Mill", 0]],
        "context": [["Mill", ["The mill is by the river."]], ["Roof", ["The roof began to leak."] * 60]],
    }  # fmt: skip
    (tmp_path / "hotpot.json").write_text(json.dumps([good, {"question": "torn"}]))
    arguments = [*RULER, "--tasks", "qa_2", "--qa-data", tmp_path / "hotpot.json", "--lengths", 450, "--items", 1,
                 "--model", model_folder, "--out", tmp_path / "out"]  # fmt: skip
    status, _, err = call(*arguments)
    assert status == 2 and "record 2 has no field 'answer'" in err and err.count("\n") == 1
    status, _, err = call(*arguments, "--skip-damaged")
    assert status == 0 and "note: 1 damaged record of" in err
    (line,) = read_lines(tmp_path / "out" / RESULTS)
    assert line["references"] == ["by the river"]


def bad(name, message, *arguments):
    return pytest.param(arguments, message, id=name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        bad("unknown command", "No such command 'evla'", "evla"),
        bad("unknown option", "No such option: --mehtod", "run", "x", "--mehtod", "fullkv"),
        bad("missing value", "requires an argument", "run", "x", "--method"),
        bad("not a number", "--seed", "run", "x", "--seed", "many"),
        bad("unknown method", "unknown method 'snapvk'; did you mean 'snapkv'?", "run", "x", "--method", "snapvk"),
        bad("unknown parameter", "did you mean 'window'?", "run", "x", "--method", "snapkv(budget=8, windw=3)"),
        bad("budget missing", "budget must be given", "run", "x", "--method", "snapkv"),
        bad("budget zero", "budget", "run", "x", "--method", "snapkv", "--budget", "0"),
        bad("budget negative", "budget", "run", "x", "--method", "snapkv", "--budget=-4"),
        bad("budget above one", "budget", "run", "x", "--method", "snapkv", "--budget", "1.5"),
        bad("budget nan", "budget", "run", "x", "--method", "snapkv", "--budget", "nan"),
        bad("budget word", "--budget 'half' is not a number", "run", "x", "--method", "snapkv", "--budget", "half"),
        bad("method listing", "did you mean 'h2o'?", "methods", "h20"),
        bad("empty prompt", "the prompt is empty", "run", " "),
        bad("no prompt", "give one prompt, or --file", "run"),
        bad("two prompts", "give one prompt, or --file", "run", "x", "--file", "y"),
        bad("unreadable file", "cannot be read (No such file or directory)", "run", "--file", "TMP/none.txt"),
        bad("binary file", "is not UTF-8", "run", "--file", "TMP/binary"),
        bad("empty file", "holds no prompt", "run", "--file", "TMP/empty"),
        bad("stream two", "--stream prints one answer", "run", "x", "--stream", "--json", "--model", "MODEL"),
        bad("long prompt", "has 600 tokens and asks for 64 more", "run", "LONG", "--model", "MODEL", "--no-chat"),
        bad("no weights", "weights", "run", "x", "--model", "TMP/weightless"),
        bad("no such model", "there is no folder", "run", "x", "--model", "TMP/nothing"),
        bad("length word", "--lengths 'long' is not a whole number", "eval", "niah", "--lengths", "long"),
        bad("length zero", "length 0 is out of range", "eval", "niah", "--lengths", "0"),
        bad("length above", "limited to 512", *NIAH, "--lengths", "600", "--model", "MODEL", "--out", "TMP/1"),
        bad("length too short", "10 is too short", *NIAH, "--lengths", "10", "--model", "MODEL", "--out", "TMP/2"),
        bad("depth above", "depth 120 is out of range", "eval", "niah", "--depths", "50,120"),
        bad("unknown kind", "did you mean 'digits'?", "eval", "niah", "--kind", "digit"),
        bad("needles", "0 needles are out of range", "eval", "niah", "--needles", "0"),
        bad("zero items", "limit 0 leaves no items", *NIAH, "--limit", "0", "--model", "MODEL", "--out", "TMP/o3"),
        bad("batch zero", "batch size 0", *NIAH, "--eval-batch-size", "0", "--model", "MODEL", "--out", "TMP/o4"),
        bad("no haystack", "does not exist", *NIAH, "--haystack", "TMP/none", "--model", "MODEL", "--out", "TMP/o5"),
        bad("two kinds of lengths", "exclude each other", *NIAH, "--s_len", "100", "--e_len", "200", "--step", "50"),
        bad("half a range", "belong together", "eval", "niah", "--s_len", "100"),
        bad("backwards", "no lengths from 200", "eval", "niah", "--s-len", "200", "--e-len", "100", "--step", "9"),
        bad("no grid", "no linear grid of 1 depths", "eval", "niah", "--depth-intervals", "1"),
        bad("spacing", "no cubic grid", "eval", "niah", "--depth-intervals", "3", "--depth-spacing", "cubic"),
        bad("two kinds of depths", "exclude each other", *NIAH, "--depth-intervals", "3"),
        bad("placement", "did you mean 'stop'?", *NIAH, "--placement", "stopp"),
        bad("needle score", "unknown score 'f1'", *NIAH, "--score", "f1"),
        bad("picture", "unknown picture format 'gif'", *NIAH, "--plot", "gif"),
        bad("unknown ruler task", "did you mean 'vt'?", *RULER, "--tasks", "vtt"),
        bad("ruler data", "qa_1 needs a local SQuAD-style JSON file", *RULER, "--tasks", "qa_1"),
        bad("ruler no file", "cannot be read", *RULER, "--qa-data", "TMP/none.json"),
        bad("ruler items", "0 items leave nothing to ask", *RULER, "--items", "0"),
        bad("ruler too short", "100 is too short for vt", *RULER, "--tasks", "vt", "--lengths", "100",
            "--model", "MODEL", "--out", "TMP/r1"),
        bad("ruler above", "limited to 512", *RULER, "--tasks", "cwe", "--lengths", "600",
            "--model", "MODEL", "--out", "TMP/r2"),
        bad("babilong without data", "babilong needs local data", "eval", "babilong"),
        bad("babilong no folder", "does not exist", "eval", "babilong", "--data", "TMP/none"),
        bad("babilong no files", "holds no file such as 1k_qa1.jsonl", "eval", "babilong", "--data", "TMP"),
        bad("fidelity items", "0 items leave nothing", "eval", "fidelity", "--items", "0"),
        bad("fidelity question", "reads plain text", "eval", "fidelity", "--hide-question"),
        bad("fidelity no text", "cannot be read", "eval", "fidelity", "--text", "TMP/none.txt",
            "--model", "MODEL", "--out", "TMP/f1"),
        bad("fidelity short text", "ends in item 1 of 4", "eval", "fidelity", "--text", "TMP/empty",
            "--model", "MODEL", "--out", "TMP/f2"),
        bad("fidelity above", "limited to 512", "eval", "fidelity", "--model", "MODEL", "--out", "TMP/f3"),
        bad("unwritable", "cannot be written", *NIAH, "--out", "TMP/empty/out"),
        bad("demo unwritable", "cannot be written", "demo", "--out", "TMP/empty/out"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(call, model_folder, tmp_path, arguments, message):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    words = {"MODEL": str(model_folder), "LONG": "the " * 600}
    status, out, err = call(*(words.get(argument, argument.replace("TMP", str(tmp_path))) for argument in arguments))
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_results_are_refused_without_resume_and_with_other_arguments(call, model_folder, tmp_path):
    arguments = [*NIAH, "--model", model_folder, "--out", tmp_path / "out"]
    assert call(*arguments)[0] == 0
    before = (tmp_path / "out" / RESULTS).read_bytes()
    status, _, err = call(*arguments)
    assert status == 2 and "add --resume" in err and err.count("\n") == 1
    status, _, err = call(*arguments, "--resume", "--seed", 3)
    assert status == 2 and "seed was 0 and is now 3" in err and err.count("\n") == 1
    assert (tmp_path / "out" / RESULTS).read_bytes() == before


def test_failed_items_leave_exit_1(call, model_folder, tmp_path, monkeypatch):
    def failing(*args, **kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr(kvfoundry, "generate", failing)
    status, _, err = call(*NIAH, "--model", model_folder, "--out", tmp_path / "out")
    assert status == 1 and "2 items failed" in err and "--resume" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_kill_in_mid_run_can_be_resumed(call, model_folder, tmp_path, number):
    out = tmp_path / "out"
    arguments = [*NIAH, "--repeats", 40, "--model", model_folder, "--out", out]
    process = in_process(*arguments)
    try:
        deadline = time.monotonic() + 90
        while not (out / RESULTS).exists() or (out / RESULTS).read_bytes().count(b"\n") < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    done = len(read_lines(out / RESULTS))
    assert 2 <= done < 80
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert (
            err.rstrip()
            .splitlines()[-1]
            .startswith("interrupted; finished items are kept. Go on with: kvfoundry eval niah")
        )
        assert err.rstrip().endswith("--resume")
    status, _, _ = call(*arguments, "--resume")
    lines = read_lines(out / RESULTS)
    assert status == 0 and len(lines) == 80 == len({line["item"] for line in lines})
    assert "shared_prompts" in json.loads((out / META).read_text())
