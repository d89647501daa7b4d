"""What an integration says where its extra is not installed."""

import sys

import pytest

from kvfoundry.cli import main


def test_the_harness_is_named_with_its_extra(monkeypatch, capsys):
    for module in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "kvfoundry.integrations.lm_eval", raising=False)
    assert main(["lm-eval", "--tasks", "hellaswag"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the lm-evaluation-harness cannot be imported") and error.count("\n") == 1
    assert "pip install 'kvfoundry[lm_eval]'" in error


@pytest.mark.parametrize("arguments", [["lm-eval", "--help"]])
def test_help_needs_no_extra(monkeypatch, capsys, arguments):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(arguments) == 0 and "Usage: kvfoundry lm-eval" in capsys.readouterr().out
