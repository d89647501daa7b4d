"""headinfer on a CUDA device: copies that run ahead never overtake what they must wait for; skipped without one."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from laws.support import forward_pieces, greedy
from tiny_models import left_padded, random_ids
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import kvfoundry
from kvfoundry.layouts.host import HostPart
from kvfoundry.layouts.ring import SLOTS
from kvfoundry.layouts.streamed import StreamedRows
from kvfoundry.layouts.streamed_codes import StreamedCodes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SPECS = [
    "fullkv", "kivi(bits=2, group=32, residual=32)", "int8", "int4+rotate", "fp8",
    "snapkv(budget=256, window=8)", "adakv(budget=256, window=8)", "quest(budget=128, skip_layers=1)",
    "quest(budget=128, skip_layers=0)+int8", "quest(budget=128, skip_layers=0, granularity=query_head)",
]  # fmt: skip


def streamed(spec: str, group: int) -> str:
    return f"headinfer(group={group})" if spec == "fullkv" else f"{spec}+headinfer(group={group})"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Five layers, so that the ring of three buffers wraps around layers and steps at every place."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=5, num_attention_heads=16, num_key_value_heads=4,
        head_dim=64, vocab_size=997, max_position_embeddings=65536, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda").eval()


def logits(model: PreTrainedModel, spec: str, ids: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    return answered(model, spec, ids, pieces)[0]


def answered(
    model: PreTrainedModel, spec: str, ids: torch.Tensor, pieces: list[int]
) -> tuple[torch.Tensor, kvfoundry.KVCache]:
    cache = kvfoundry.KVCache(model, spec)
    cache.expect_prompt(sum(size for size in pieces if size > 8))
    return forward_pieces(model, cache, ids, pieces), cache


def kept(cache: kvfoundry.KVCache) -> set[tuple[int, int, int]]:
    """(layer, head, token) of every row of the only sequence."""
    return {
        (layer, head, token)
        for layer, each in enumerate(cache.attention_layers)
        for head, tokens in enumerate(each.positions[0].tolist())
        for token in tokens
        if token >= 0
    }


@pytest.mark.parametrize("pieces", [[6000], [1500] * 4], ids=["at once", "in pieces"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_many_steps_say_what_rows_on_the_device_say(spec, group, pieces, model) -> None:
    """Several moves of waiting rows, calls of several tokens, no pause between steps for copies to catch up."""
    steps = [1] * 150 + [5, 3] + [1] * 20
    ids = random_ids(1, sum(pieces) + sum(steps)).cuda()
    (found, here), (expected, there) = (
        answered(model, method, ids, pieces + steps) for method in (streamed(spec, group), spec)
    )
    if spec.startswith("adakv") and kept(here) != kept(there):
        # Scores that differ by a hundred-thousandth, as the second piece's do, may rank two rows of a layer the other
        # way round, and what comes after follows: 13 of 5,120 rows were seen to differ.
        assert len(pieces) > 1
        assert len(kept(here) & kept(there)) > 0.95 * len(kept(there))
        return
    if kvfoundry.Method.parse(spec).codec is not None:
        # a row that differs in its last bit may get another code: weights moved by a millionth gave 0.005 with int8 and
        # 0.013 with fp8, where rows out of place give more than 1
        assert float((found - expected).norm()) < 3e-2 * float(expected.norm())
    else:
        assert float((found - expected).abs().max()) < 2e-3 * float(expected.abs().max())


@pytest.mark.parametrize("spec", ["fullkv", "kivi(bits=4, group=32, residual=32)", "snapkv(budget=256, window=8)"])
def test_text_is_that_of_the_full_cache_again_and_again(spec, model) -> None:
    ids = random_ids(1, 3000).cuda()
    expected = greedy(model, kvfoundry.KVCache(model, spec), ids, steps=200)
    for _ in range(5):
        assert torch.equal(greedy(model, kvfoundry.KVCache(model, streamed(spec, 1)), ids, steps=200), expected)


def test_a_slow_device_is_waited_for(model) -> None:
    """Buffers are not filled again while something that was enqueued before still has to read them."""
    ids = random_ids(1, 2100).cuda()
    expected = logits(model, "fullkv", ids, [2000] + [1] * 100)
    sleep = torch.cuda._sleep
    attend = StreamedRows.attend

    def late(rows: StreamedRows, *args: object) -> torch.Tensor:
        sleep(3_000_000)
        return attend(rows, *args)

    StreamedRows.attend = late  # type: ignore[method-assign]
    try:
        found = logits(model, "headinfer()", ids, [2000] + [1] * 100)
    finally:
        StreamedRows.attend = attend  # type: ignore[method-assign]
    assert float((found - expected).abs().max()) < 2e-3 * float(expected.abs().max())


def test_a_slow_link_is_waited_for(model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read before it has arrived: every copy to the device is held up on its stream."""
    ids = random_ids(1, 2100).cuda()
    expected = logits(model, "fullkv", ids, [2000] + [1] * 100)
    copy_to = HostPart.copy_to

    def late(part: HostPart, *args: object) -> int:
        torch.cuda._sleep(300_000)
        return copy_to(part, *args)

    monkeypatch.setattr(HostPart, "copy_to", late)
    found = logits(model, "headinfer()", ids, [2000] + [1] * 100)
    assert float((found - expected).abs().max()) < 2e-3 * float(expected.abs().max())


def test_buffers_are_nobody_elses_until_the_last_copy_has_arrived(model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is dropped leaves copies on their way: what takes its memory then stays as it was written."""
    ids = random_ids(1, 2010).cuda()
    copy_to = HostPart.copy_to

    def late(part: HostPart, *args: object) -> int:
        torch.cuda._sleep(50_000_000)
        return copy_to(part, *args)

    cache = kvfoundry.KVCache(model, "headinfer()")
    with torch.inference_mode():
        forward_pieces(model, cache, ids, [2000] + [1] * 9)
        monkeypatch.setattr(HostPart, "copy_to", late)
        forward_pieces(model, cache, ids[:, -1:], [1])
    sizes = [buffer.nbytes for buffer in cache.prompt.rings.tensors()]
    assert len(sizes) == SLOTS
    del cache
    gc.collect()
    taken = [torch.ones(size // 4, device="cuda") for size in sizes * 4]
    torch.cuda.synchronize()
    assert all(bool((each == 1).all()) for each in taken)


def test_batches_beams_forks_and_copies(model) -> None:
    ids, mask = (tensor.cuda() for tensor in left_padded([900, 500]))
    answers = [greedy(model, kvfoundry.KVCache(model, spec), ids, mask, steps=80) for spec in ("fullkv", "headinfer()")]
    assert torch.equal(*answers)
    beams = [
        model.generate(ids, attention_mask=mask, past_key_values=kvfoundry.KVCache(model, spec), max_new_tokens=30,
                       num_beams=3, do_sample=False, pad_token_id=0)
        for spec in ("fullkv", "headinfer()")
    ]  # fmt: skip
    assert torch.equal(*beams)
    found = []
    for spec in ("fullkv", "headinfer()"):
        cache = kvfoundry.KVCache(model, spec)
        forward_pieces(model, cache, ids[:1], [900])
        fork, twin = cache.fork(), copy.deepcopy(cache)
        later = [random_ids(1, 90, seed=seed).cuda() for seed in range(3)]
        found.append(
            torch.cat([
                forward_pieces(model, each, more, [1] * 90)
                for each, more in zip((fork, twin, cache), later, strict=True)
            ])
        )  # fmt: skip
    assert float((found[0] - found[1]).abs().max()) < 2e-3 * float(found[0].abs().max())


def test_the_device_holds_a_few_heads(model) -> None:
    """Counted by the allocator: a second prompt, four times as long, takes buffers and nothing else that grows."""
    torch.cuda.empty_cache()
    before, held = torch.cuda.memory_allocated(), []
    for tokens in (8192, 32768):
        cache = kvfoundry.KVCache(model, "headinfer()")
        cache.expect_prompt(tokens)
        with torch.inference_mode():
            ids = random_ids(1, tokens).cuda()
            for start in range(0, tokens, 4096):
                model(ids[:, start : start + 4096], past_key_values=cache, use_cache=True, logits_to_keep=1)
            model(ids[:, :1], past_key_values=cache, use_cache=True)
        del ids
        head = 2 * tokens * 64 * 4
        held.append(torch.cuda.memory_allocated() - before - cache.prompt.rings.nbytes)
        assert cache.prompt.rings.nbytes <= 1.2 * SLOTS * head + 8 * SLOTS * 4096 * 64
        for tensor in cache.attention_layers[0].host_tensors():
            assert tensor.is_pinned()
        del cache
        gc.collect()
    assert held[1] < held[0] + (1 << 20)


def test_codes_are_read_by_the_kernel(model, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    read = []
    kernel = StreamedCodes._kernel
    monkeypatch.setattr(StreamedCodes, "_kernel", lambda *args: read.append(kernel(*args)) or read[-1])
    ids = random_ids(1, 1010).cuda()
    logits(model, "kivi(bits=2, group=32, residual=32)+headinfer()", ids, [1000] + [1] * 10)
    assert sum(each is not None for each in read) == 5 * 10


@pytest.mark.parametrize("make", [lambda m: m.half(), lambda m: m.bfloat16()], ids=["float16", "bfloat16"])
def test_low_precision_stays_as_near_as_it_is(make: Callable[[PreTrainedModel], PreTrainedModel], model) -> None:
    low = make(copy.deepcopy(model))
    ids = random_ids(1, 2020).cuda()
    for spec in ("fullkv", "kivi(bits=2, group=32, residual=32)"):
        found, expected = (logits(low, s, ids, [1000, 1000] + [1] * 20) for s in (streamed(spec, 2), spec))
        assert float((found - expected).norm()) < 3e-2 * float(expected.norm())


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    "spec",
    [
        "fullkv", "kivi(bits=2, group=32, residual=32)", "int8", "int4+rotate", "snapkv(budget=256, window=8)",
        "adakv(budget=256, window=8)", "quest(budget=128, skip_layers=1)",
        "adakv(budget=512, window=8)+quest(budget=128, skip_layers=0)",
    ],
)  # fmt: skip
def test_the_engine_replays_copies_too(spec, group, model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are part of the graph; held up on their stream, they are waited for."""
    copy_to = HostPart.copy_to

    def late(part: HostPart, *args: object) -> int:
        torch.cuda._sleep(200_000)
        return copy_to(part, *args)

    ids = random_ids(1, 2100).cuda()
    expected, found = [], []
    for method, said in ((spec, expected), (streamed(spec, group), found)):
        cache = kvfoundry.KVCache(model, method)
        cache.expect_prompt(2100)
        token = forward_pieces(model, cache, ids, [2100])[:, -1:].argmax(dim=-1)
        if said is found:
            monkeypatch.setattr(HostPart, "copy_to", late)
        engine = kvfoundry.DecodeEngine(model, room=64)
        program = engine.begin(cache, torch.cat([ids, token], dim=1), 90)
        for _ in range(90):
            program.advance()
            said.append(program.said.float().clone())
        assert program.is_recorded, program.note
        engine.finish(cache, 90, keep=False)
    error = max(float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True))
    assert error < 1e-3
