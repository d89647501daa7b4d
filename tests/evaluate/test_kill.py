"""A run that is killed (SIGKILL) at ten random moments and resumed leaves the results of an undisturbed one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfoundry.evaluate.results import PROMPTS, REPORT, RESULTS, SUMMARY, read_lines

TIMES = ("ttft_seconds", "ms_per_token", "seconds")

# One process loads everything; every attempt is a process of its own, forked from it, and is killed from outside.
DRIVER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
import kvfoundry
from kvfoundry.evaluate.runner import evaluate
from kvfoundry.evaluate.tasks.niah import NeedleTask

torch.set_num_threads(1)
folder, model_folder, kills, batch_size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model, tokenizer = kvfoundry.load(model_folder)
task = NeedleTask(lengths=(90, 120), depths=(0.0, 50.0, 100.0), repeats=2, max_new_tokens=2)

def run(out):
    evaluate(model, tokenizer, [task], ["fullkv", "snapkv(window=8)", "h2o(window=8)"], out=out, budgets=[24, 0.5],
             batch_size=batch_size, resume=True)

def attempt(out):
    child = os.fork()
    if child == 0:
        run(out)
        os._exit(0)
    return child

began = time.perf_counter()
assert os.waitpid(attempt(folder / "whole"), 0)[1] == 0
undisturbed = time.perf_counter() - began
rng, results, seen, killed = random.Random(int(sys.argv[5])), folder / "killed" / "results.jsonl", [], 0

def lines():
    return results.read_bytes().count(b"\\n") if results.exists() else 0

while killed < kills:
    if lines() == 60:  # all answers are there: start over, the kills are what counts
        for path in (folder / "killed").iterdir():
            path.unlink()
    # After so many more answers and a moment, wherever that is; without any, somewhere in the preparation.
    before, more = lines(), rng.choice((0, 1, 3, 6, 9))
    child, ended = attempt(folder / "killed"), 0
    while lines() - before < more and not ended:
        time.sleep(0.001)
        ended = os.waitpid(child, os.WNOHANG)[0]
    time.sleep(rng.uniform(0, 0.05) if more else rng.uniform(0, undisturbed / 4))
    if not ended:
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    seen.append(lines())
assert os.waitpid(attempt(folder / "killed"), 0)[1] == 0
print(*seen)
"""


def timeless(path: Path) -> list[dict]:
    return [{name: value for name, value in line.items() if name not in TIMES} for line in read_lines(path)]


def killed_run(folder: Path, model_folder: Path, kills: int, batch_size: int, seed: int) -> list[int]:
    """Lines that stood in the results after each kill."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *map(str, (folder, model_folder, kills, batch_size, seed))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_ten_kills_leave_the_results_of_an_undisturbed_run(model_folder, tmp_path):
    progress = killed_run(tmp_path, model_folder, kills=10, batch_size=3, seed=4)
    assert len(progress) >= 10 and len(set(progress)) > 2  # the kills met the run at different places
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert timeless(killed / RESULTS) == timeless(whole / RESULTS)
    assert len(timeless(killed / RESULTS)) == 12 * 5
    assert (killed / PROMPTS).read_bytes() == (whole / PROMPTS).read_bytes()
    summaries = [json.loads((folder / SUMMARY).read_text()) for folder in (whole, killed)]
    for summary in summaries:
        for row in summary["rows"] + summary["board"]:
            for name in TIMES:
                row.pop(name, None)
    assert summaries[0] == summaries[1] and (killed / REPORT).exists()
    assert not list(killed.glob("*.tmp"))
