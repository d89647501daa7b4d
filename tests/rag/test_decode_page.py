"""The page on decoding shows the figures that were measured, and every policy and option that there is."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from kvfoundry.rag.policies import policies

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "rag.md").read_text()


def test_the_table_is_the_results() -> None:
    """To renew it: python benchmarks/rag_decode.py --tables"""
    spec = importlib.util.spec_from_file_location("rag_decode", ROOT / "benchmarks" / "rag_decode.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    record = json.loads((ROOT / "benchmarks" / "results" / "rag_decode.json").read_text())
    assert module.table(record) in PAGE
    assert module.summary(record["samples"]) == record["summary"]


def test_every_policy_is_on_the_page() -> None:
    for name in policies():
        assert f"| `{name}" in PAGE
