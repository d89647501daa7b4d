"""Clocks and rooflines against numbers made by hand."""

from __future__ import annotations

import time

import pytest
import torch
from tiny_models import HEAD_DIM, KV_HEADS, LAYERS, QUERY_HEADS, VOCABULARY, WINDOW

from kvfoundry.bench.roofline import Roofline, prompt_flops, row_bytes, weight_bytes
from kvfoundry.bench.timing import Clock, spread, step_times
from kvfoundry.bench.transfer import copy_rate, disk_rates, link_rate, link_rates, matmul_rate
from kvfoundry.errors import DataError
from kvfoundry.planning.geometry import geometry

CPU = torch.device("cpu")


def test_the_spread_of_known_times():
    found = spread([0.001 * n for n in range(11)])
    assert found == {"ms": 5.0, "ms_p10": 1.0, "ms_p90": pytest.approx(9.0), "steps": 11}


def test_every_step_is_timed_once():
    seen = []
    times = step_times(lambda: (seen.append(len(seen)), time.sleep(0.002)), 5, CPU)
    assert len(seen) == len(times) == 5 and min(times) >= 0.002


def test_the_clock_looks_at_the_first_token_only_and_leaves_steps_out():
    looks = []
    clock = Clock(CPU, at_first=lambda: looks.append(len(clock.times)))
    for _ in range(9):
        assert not clock(torch.zeros(3, 1), None).any()
    assert looks == [1] and len(clock.times) == 9
    assert len(clock.steps(0)) == 8 and len(clock.steps(2, last=2)) == 4
    clock.times = [0.0, 1.0, 3.0, 6.0, 10.0]
    assert clock.steps(1) == [2.0, 3.0, 4.0] and clock.steps(1, last=1) == [2.0, 3.0]


def test_the_roofline_is_the_longer_of_bytes_and_operations():
    line = Roofline(100.0, 10.0)
    assert line.seconds(200) == 2.0 and line.seconds(200, 50) == 5.0 and Roofline(100.0).seconds(200, 50) == 2.0
    assert (line.bound(200), line.bound(200, 50)) == ("memory", "compute")
    assert Roofline(100.0, 10.0, 2.0).seconds(200, 50, linked=20) == 10.0 and line.seconds(200, linked=20) == 2.0
    found = line.beside([4.0, 6.0, 8.0], 300)
    assert (found["ms"], found["roofline_ms"], found["times_roofline"]) == (6000.0, 3000.0, 2.0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_all_weights_but_an_embedding_of_its_own(tiny_model, tied):
    model = tiny_model("llama", tie_word_embeddings=tied)
    everything = sum(weight.nbytes for weight in model.parameters())
    assert weight_bytes(model) == everything - (0 if tied else VOCABULARY * 64 * 4)


def test_a_step_reads_the_experts_that_its_batch_may_choose(tiny_model):
    model = tiny_model("mixtral")  # two of four experts for each token
    experts = sum(weight.nbytes for name, weight in model.named_parameters() if ".experts." in name)
    assert experts > 0
    assert weight_bytes(model, 2) - weight_bytes(model, 1) == experts // 2
    assert weight_bytes(model, 8) == weight_bytes(model, 2)


def test_rows_of_window_layers_end_with_the_window(tiny_model):
    row = KV_HEADS * 2 * HEAD_DIM * 4
    assert row_bytes(geometry(tiny_model("llama")), 100, 4) == LAYERS * 100 * row
    assert row_bytes(geometry(tiny_model("gemma2")), 100, 4) == (100 + WINDOW) * row


def test_operations_of_a_prompt(tiny_model):
    model, tokens = tiny_model("llama"), 10
    linear = 64 * 128 * 2 + 64 * 32 * 2 + 3 * 64 * 96  # query and output, key and value, the three of the MLP
    attention = 2 * QUERY_HEADS * 2 * HEAD_DIM * (tokens * (tokens + 1) // 2)
    one = LAYERS * (2 * linear * tokens + attention) + 2 * 64 * VOCABULARY
    assert prompt_flops(model, geometry(model), tokens, 1) == one
    assert prompt_flops(model, geometry(model), tokens, 3) == 3 * one


def test_rates_are_measured(tmp_path):
    assert copy_rate(CPU) > 1e8 and matmul_rate(CPU, torch.float32) > 1e8 and link_rates(CPU) == {}
    assert link_rate(CPU) > 1e8 and link_rate(CPU, back=True) > 1e8
    rates = disk_rates(tmp_path, 1 << 20)
    assert len(rates) == 2 and all(rate > 0 for rate in rates.values()) and list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="cannot be written"):
        disk_rates(tmp_path / "nowhere", 1 << 20)
