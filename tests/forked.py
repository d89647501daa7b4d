"""A command or a script in a process of its own, forked from one that has loaded torch and transformers already.

Loading these takes longer than most commands do. Of kvfoundry nothing is loaded before the fork.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

# What comes out of a child goes to the files that its order names; one that hangs is ended by its alarm.
_FORKING = """
import json, os, runpy, signal, sys
import torch, transformers, transformers.generation, transformers.models.llama.modeling_llama

for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm(600)
        os.chdir(order["folder"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, order["out"]), (2, order["err"])):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = order["words"]
        if sys.argv[0] == "kvfoundry":
            from kvfoundry.cli import main

            sys.exit(main(sys.argv[1:]))
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _forking() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    atexit.register(process.kill)
    return process


def run_forked(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `kvfoundry ...`, or a script and its arguments, in a folder; needs a system with fork."""
    process = _forking()
    assert process.stdin is not None and process.stdout is not None
    with tempfile.TemporaryDirectory() as told:
        out, err = Path(told) / "out", Path(told) / "err"
        order = {"words": words, "folder": str(folder), "out": str(out), "err": str(err)}
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        status = int(process.stdout.readline())
        return subprocess.CompletedProcess(words, status, out.read_text(), err.read_text())
