"""A compiled step says what the model says, with its cosines made once, and leaves the model as it was."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from tiny_models import random_ids
from torch import Tensor

from kvfoundry import DecodeEngine, KVCache
from kvfoundry.engine import compiled
from kvfoundry.rope_layout import rotary_module


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_a_compiled_step(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a family with a table for every kind of layer."""
    torch._dynamo.reset()
    settled: list[Tensor] = []
    monkeypatch.setattr(compiled, "_settle", noting(compiled._settle, settled))
    model, ids = tiny_model("gemma3"), random_ids(2, 30)
    said = []
    for compile in (False, True):
        cache = KVCache(model, "snapkv(budget=16, window=4)")
        with torch.inference_mode():
            model(ids[:, :-1], use_cache=True, past_key_values=cache)
            program = DecodeEngine(model, compile=compile, graph=False).begin(cache, ids, 8)
            steps = []
            for _ in range(3):
                program.advance()
                assert program.said is not None
                steps.append(program.said.clone())
        said.append(torch.stack(steps))
    assert float((said[0] - said[1]).abs().max()) < 1e-4 * float(said[0].abs().max())
    assert settled  # the step was traced with the tables of the rotary module kept in memory
    rotary = rotary_module(model)
    assert rotary is not None and not rotary._forward_hooks


def noting(settle: Any, settled: list[Tensor]) -> Any:
    def noted(tensor: Tensor) -> Tensor:
        settled.append(tensor)
        found: Tensor = settle(tensor)
        return found

    return noted
