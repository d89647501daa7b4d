"""Every code block of the README and the docs runs, and the README's table of methods is the register's."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from forked import run_forked

import kvfoundry

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_DATA = ("evaluation.md", "from_the_playground.md", "lm_eval.md")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED_COMMAND = re.compile(r"^    ((?:make|kvfoundry|python) .*)$", re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in _BLOCK.findall(page.read_text()) if found == language]


def commands(page: Path) -> list[str]:
    """Lines of console blocks and indented command lines, comments cut off."""
    text = page.read_text()
    lines = [line for body in blocks(page, "console") for line in body.splitlines()]
    lines += _INDENTED_COMMAND.findall(_BLOCK.sub("", text))
    return [line.strip() for line in lines if line.strip()]


def looks_into_a_store(page: Path) -> bool:
    """Whether the page's commands read the store that its Python blocks make."""
    return any(line.startswith("kvfoundry store") for line in commands(page))


# The demo is minutes long and has a test of its own: here its options are read. Of a task one item is asked, and a
# benchmark, whose grid has tests of its own, leaves out what does not fit into its seconds.
SHORTER = {"demo": ["--help"], "eval": ["--limit", "1"], "bench": ["--limit", "15"]}

# One command line of every command: these start in a fresh interpreter.
FIRST_OF_ITS_KIND = {
    line.split()[1]: line
    for page in reversed(PAGES)
    if page.name not in WITH_DATA
    for line in reversed(commands(page))
    if line.startswith("kvfoundry ")
}.values()


def test_only_known_kinds_of_blocks_are_used() -> None:
    for page in PAGES:
        assert {language for language, _ in _BLOCK.findall(page.read_text())} <= {"python", "console", "text"}, page


@pytest.mark.embedded
@pytest.mark.slow
@pytest.mark.parametrize(
    # The blocks of the other pages run before their commands.
    "page",
    [page for page in PAGES if blocks(page, "python") and not looks_into_a_store(page)],
    ids=lambda page: page.name,
)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """The blocks of one page run in order, in one process."""
    _run_python(page, tmp_path)


def _run_python(page: Path, folder: Path) -> None:
    script = folder / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    # The README's in a fresh interpreter, as its readers run them.
    done = _run_alone([str(script)], folder) if page.name == "README.md" else _run_process([str(script)], folder)
    assert done.returncode == 0, done.stderr


def _run_alone(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A command or a script in a fresh interpreter."""
    code = "import sys; from kvfoundry.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, *(["-c", code, *words[1:]] if words[0] == "kvfoundry" else words)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


_run_process = run_forked if hasattr(os, "fork") else _run_alone


def _run(line: str, folder: Path) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        assert subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True).returncode == 0, line
    elif words[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = re.findall(r"\[([\w,]+)\]", line)
        assert set(",".join(named).split(",")) <= set(extras), line
    elif words[0] == "python":
        assert (ROOT / words[1]).exists(), line
    else:
        extra = SHORTER.get(words[1], [])
        run = _run_alone if line in FIRST_OF_ITS_KIND else _run_process
        done = run([*words, *extra], folder)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.embedded
@pytest.mark.slow
@pytest.mark.parametrize(
    # The commands of these pages read data files: tests/evaluate and tests/integrations make such files and run them.
    "page",
    [page for page in PAGES if commands(page) and page.name not in WITH_DATA],
    ids=lambda page: page.name,
)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    if looks_into_a_store(page):
        _run_python(page, tmp_path)  # which makes the store that the commands look into
    for line in commands(page):
        _run(line, tmp_path)


def method_table() -> str:
    """The README's table, from the register."""
    lines = ["| name | what it does | axes | paper |", "|---|---|---|---|"]
    for name, info in kvfoundry.methods().items():
        parameters = ", ".join(name for name in info.parameters if name not in ("granularity", "group"))
        axes = "; ".join(f"**{axis}** {member}" for axis, member in info.axes.items())
        lines.append(f"| `{name}({parameters})` | {info.summary} | {axes} | {info.paper} |")
    return "\n".join(lines)


def test_the_table_of_methods_is_the_registers() -> None:
    """To renew it: python -m tests.test_docs"""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- methods:begin.*?-->\n(.*?)\n?<!-- methods:end -->", text, re.DOTALL)
    assert found is not None
    assert found[1].strip() == method_table()


if __name__ == "__main__":
    readme = ROOT / "README.md"
    renewed = re.sub(
        r"(<!-- methods:begin.*?-->\n).*?(<!-- methods:end -->)",
        lambda match: match[1] + method_table() + "\n" + match[2],
        readme.read_text(),
        flags=re.DOTALL,
    )
    readme.write_text(renewed)
