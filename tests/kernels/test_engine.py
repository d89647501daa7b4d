"""The engine over the fused kernels gives the text of the plain loop."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_ids

import kvfoundry
from kvfoundry import DecodeEngine


def words(tokens: int, seed: int) -> str:
    return " ".join(f"w{i}" for i in random_ids(tokens, seed=seed).tolist())


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("llama", "adakv(budget=8, window=4)"),
        ("gpt_oss", "h2o(budget=8, window=4)"),
        ("llama", "kivi(bits=4, group=16, residual=0)"),
        ("qwen2", "quest(budget=8, page=4, skip_layers=0)"),
        ("gpt_oss", "headinfer()"),
        ("llama", "snapkv(budget=16, window=4)+headinfer()+kivi(bits=4, group=4, residual=4)"),
        ("qwen2", "quest(budget=8, page=4, skip_layers=1)+headinfer()"),
    ],
)
def test_the_text_is_that_of_the_plain_loop(
    family: str, spec: str, device: torch.device, tiny_model, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type != "cpu":
        pytest.skip("tests/gpu/test_engine_cuda.py has it on the GPU")
    from kvfoundry.engine.attention import TritonKernels

    model, prompts = tiny_model(family), [words(18, 1), words(19, 2)]
    expected = kvfoundry.generate(model, tokenizer, prompts, spec, max_new_tokens=4, engine=False)
    monkeypatch.setattr("kvfoundry.engine.engine.kernels_for", lambda _: TritonKernels())
    engine = DecodeEngine(model)
    assert kvfoundry.generate(model, tokenizer, prompts, spec, max_new_tokens=4, engine=engine) == expected
    assert engine.recorded == 1
