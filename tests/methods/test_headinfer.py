"""headinfer: rows on the host read like rows on the device, and the device holds a few heads, whatever the prompt."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from laws.support import forward_pieces, greedy
from tiny_models import KV_HEADS, LAYERS, left_padded, random_ids
from torch import Tensor

import kvfoundry
from kvfoundry.errors import SpecError
from kvfoundry.kernels.coded_decode import naive as coded_naive
from kvfoundry.layouts.host import HostPart
from kvfoundry.layouts.ring import SLOTS, Ring
from kvfoundry.layouts.streamed import WAITING, StreamedRows
from kvfoundry.layouts.streamed_codes import StreamedCodes
from kvfoundry.reading import chosen

# What may stand beside headinfer: codecs of every form, methods that drop rows and choose rows, their mixtures.
PARTNERS = [
    "fullkv", "kivi(bits=2, group=4, residual=8)", "kivi(bits=4, group=4, residual=8, flow=paper)", "int8",
    "int4(keys=tokens, group=4)+rotate", "fp8", "gear(block=4, group=4, rank=2)", "snapkv(budget=12, window=4)",
    "adakv(budget=12, window=4)", "h2o(budget=12, window=4)", "tova(budget=12, granularity=query_head)",
    "streamingllm(budget=12)+park()", "h2o(budget=40, window=4)+int4(group=4)",
    "snapkv(budget=24, window=4)+kivi(bits=2, group=4, residual=4)", "quest(budget=12, page=4, skip_layers=1)",
    "quest(budget=12, page=4, skip_layers=0, rule=tokens, recent=3)+int4", "adakv(budget=40, window=4)+int4(group=4)",
]  # fmt: skip
LENGTHS = [60, 47, 20]
PIECES = {"at once": [50, *[1] * 5, 4, 1], "in pieces": [16, 16, 10, 8, 1, 1, 3, 5]}


def streamed(spec: str, group: int = 1) -> str:
    return f"headinfer(group={group})" if spec == "fullkv" else f"{spec}+headinfer(group={group})"


@pytest.mark.parametrize(("pieces", "group"), zip(PIECES, [2, 1], strict=True))
@pytest.mark.parametrize("spec", PARTNERS)
def test_logits_are_those_of_the_method_on_the_device(spec, group, pieces, tiny_model):
    model = tiny_model("llama")
    ids, mask = left_padded(LENGTHS)
    logits, kept = [], []
    for method in (spec, streamed(spec, group)):
        cache = kvfoundry.KVCache(model, method)
        cache.expect_prompt(50)
        logits.append(forward_pieces(model, cache, ids, PIECES[pieces], mask) * mask[..., None])
        kept.append(cache)
    assert torch.allclose(*logits, atol=2e-5)
    for layer, other in zip(kept[0].attention_layers, kept[1].attention_layers, strict=True):
        assert isinstance(other.rows, (StreamedRows, StreamedCodes))
        assert torch.equal(layer.positions, other.positions) and torch.equal(layer.lengths, other.lengths)
        assert torch.allclose(layer.keys, other.keys, atol=1e-5)
        assert torch.allclose(layer.values, other.values, atol=1e-5)


@pytest.mark.parametrize("spec", ["fullkv", "kivi(bits=2, group=4, residual=8)", "quest(budget=32, page=4)"])
def test_a_long_answer_goes_through_many_moves(spec, tiny_model):
    """Waiting rows leave the device several times, and what was sent for before is not read in their place."""
    model, ids = tiny_model("llama"), random_ids(1, 40)
    found, expected = (kvfoundry.KVCache(model, method) for method in (streamed(spec), spec))
    steps = 3 * WAITING + 5
    assert torch.equal(greedy(model, found, ids, steps=steps), greedy(model, expected, ids, steps=steps))


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "gemma2", "qwen3"])
def test_windows_sinks_and_softcap(family, tiny_model):
    model = tiny_model(family)
    ids, mask = left_padded([50, 37])
    pieces = [20, 20, 1, 1, 5, 3]
    found, expected = (
        forward_pieces(model, kvfoundry.KVCache(model, spec), ids, pieces, mask) for spec in ("headinfer()", "fullkv")
    )
    assert float(((found - expected).abs().amax(-1) * mask).max()) < 1e-4


@pytest.mark.parametrize("spec", ["fullkv", "int4(group=4)", "snapkv(budget=12, window=4)"])
def test_forks_copies_crops_and_beams(spec, tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 90)
    caches = [kvfoundry.KVCache(model, method) for method in (spec, streamed(spec))]
    for cache in caches:
        forward_pieces(model, cache, ids[:, :80], [80])
    logits = []
    for cache in caches:
        fork, twin = cache.fork(), copy.deepcopy(cache)
        found = [forward_pieces(model, each, ids[:, 80:] + i, [4] + [1] * 6) for i, each in enumerate((fork, twin))]
        long = forward_pieces(model, fork, random_ids(1, 180, seed=9)[:, :180], [1] * 90)
        logits.append(torch.cat([*found, long, forward_pieces(model, cache, ids[:, 80:], [10])], dim=1))
    assert torch.allclose(*logits, atol=2e-5)
    if "snapkv" not in spec:
        for cache in caches:
            cache.crop(-5)
            cache.crop(70)  # into what is on the host
        found, expected = (forward_pieces(model, cache, ids[:, 70:], [20]) for cache in caches)
        assert torch.allclose(found, expected, atol=2e-5)
    answers = [
        model.generate(ids, past_key_values=kvfoundry.KVCache(model, method), max_new_tokens=12, num_beams=3,
                       do_sample=False, pad_token_id=0, eos_token_id=None)
        for method in (spec, streamed(spec))
    ]  # fmt: skip
    assert torch.equal(*answers)


def test_a_recalled_cache_streams_all_rows(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 60)
    full = kvfoundry.KVCache(model)
    cache = kvfoundry.KVCache(model, "snapkv(budget=12, window=4)+park()+headinfer()")
    forward_pieces(model, cache, ids[:, :50], [50])
    assert cache.host_nbytes > cache.parked_nbytes > 0
    cache.recall()
    found = forward_pieces(model, cache, ids[:, 50:], [10])
    assert torch.allclose(found, forward_pieces(model, full, ids, [50, 10])[:, 50:], atol=1e-5)
    assert cache.parked_nbytes == 0 < cache.host_nbytes


def test_the_second_reading_of_kvzip(tiny_model, tokenizer):
    model, text = tiny_model("llama"), " ".join(f"w{3 + i % 90}" for i in range(70))
    specs = ["kvzip(budget=0.4)", "kvzip(budget=0.4)+headinfer()"]
    found = [kvfoundry.generate(model, tokenizer, text, spec, max_new_tokens=8, details=True) for spec in specs]
    assert found[0].token_ids == found[1].token_ids and found[0].kept_rows == found[1].kept_rows


@pytest.mark.parametrize("spec", ["fullkv", "int8"])
def test_device_bytes_do_not_follow_the_prompt(spec, tiny_model):
    """After the prompt the device holds what waits; in decode a few buffers, of one head each, more."""
    model, held = tiny_model("llama"), []
    positions = 0 if spec == "fullkv" else 2  # bytes of a row's position, which stays beside codes
    for tokens in (512, 2048):
        cache = kvfoundry.KVCache(model, streamed(spec))
        cache.expect_prompt(tokens)
        forward_pieces(model, cache, random_ids(1, tokens), [128] * (tokens // 128))
        rows = cache.attention_layers[0].rows
        assert rows is not None
        held.append(sum(layer.nbytes for layer in cache.attention_layers) - positions * LAYERS * tokens)
        forward_pieces(model, cache, random_ids(1, 1), [1])
        head = rows.hosted_nbytes / KV_HEADS
        assert cache.nbytes - sum(layer.nbytes for layer in cache.attention_layers) <= 1.4 * SLOTS * head + 4096 * SLOTS
        assert cache.host_nbytes == pytest.approx(LAYERS * rows.hosted_nbytes, rel=0.3)
        assert "host memory" in cache.notes[-1]
    assert held[0] == held[1]


def test_every_head_crosses_the_link_once_a_step(tiny_model):
    """What is sent for ahead is what is read next, also from the last layer to the first one of the next step."""
    model, ids = tiny_model("llama"), random_ids(1, 200)
    cache = kvfoundry.KVCache(model, "headinfer()")
    forward_pieces(model, cache, ids, [200])
    row = 2 * 16 * 4
    before = cache.prompt.rings.link_nbytes
    assert before[1] == LAYERS * (KV_HEADS * 200 * row + 200 * 4)
    forward_pieces(model, cache, random_ids(1, 3), [1] * 3)
    ahead = SLOTS - 1 if LAYERS * KV_HEADS > SLOTS else 0
    assert cache.prompt.rings.link_nbytes[0] <= (3 * LAYERS * KV_HEADS + ahead) * 200 * row
    assert cache.prompt.rings.link_nbytes[1] == before[1]  # new rows wait


def test_quest_fetches_its_pages_alone(tiny_model, monkeypatch):
    model, ids = tiny_model("llama"), random_ids(2, 300)
    spec, chosen_by = "quest(budget=32, page=8, skip_layers=0)", []
    attend = chosen.attend
    monkeypatch.setattr(chosen, "attend", lambda *args: chosen_by.append(1) or attend(*args))
    caches = [kvfoundry.KVCache(model, method) for method in (spec, streamed(spec))]
    for cache in caches:
        forward_pieces(model, cache, ids, [300])
        forward_pieces(model, cache, ids[:, :1], [1])  # bounds of all pages are found now
    sent = caches[1].prompt.rings.link_nbytes[0]
    found, expected = (forward_pieces(model, cache, ids[:, :90], [1] * 90) for cache in caches)
    assert torch.allclose(found, expected, atol=1e-5) and len(chosen_by) == LAYERS * 91
    steps = (caches[1].prompt.rings.link_nbytes[0] - sent) / 90
    pages = LAYERS * 2 * KV_HEADS * 32 * 2 * 16 * 4
    assert pages <= steps < 1.5 * pages < 0.2 * LAYERS * 2 * KV_HEADS * 300 * 2 * 16 * 4 * 2


@pytest.mark.parametrize("spec", ["kivi(bits=2, group=4, residual=8)", "int4+rotate", "fp8", "int8(mode=zero_point)"])
def test_kernels_for_codes_get_what_they_read(spec, tiny_model, monkeypatch):
    """One pass over codes and whole rows (here its reference) says what decoding tile by tile says."""
    model = tiny_model("llama")
    ids, mask = left_padded([90, 70])
    expected = forward_pieces(model, kvfoundry.KVCache(model, streamed(spec, 2)), ids, [80] + [1] * 10, mask)
    taken = []

    def kernel(rows: StreamedCodes, query: Tensor, reading: Any) -> Any:
        taken.append(query.shape[2] == 1)
        return coded_naive if query.shape[2] == 1 else None

    monkeypatch.setattr(StreamedCodes, "_kernel", kernel)
    found = forward_pieces(model, kvfoundry.KVCache(model, streamed(spec, 2)), ids, [80] + [1] * 10, mask)
    assert any(taken) and float(((found - expected).abs().amax(-1) * mask).max()) < 1e-4


def test_a_buffer_is_not_lost_to_an_exception(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 80)
    cache = kvfoundry.KVCache(model, "headinfer()")
    forward_pieces(model, cache, ids, [80])
    ring = cache.prompt.rings.on(torch.device("cpu"))
    rows = cache.attention_layers[0].rows
    assert isinstance(rows, StreamedRows)
    for _ in range(2 * SLOTS):
        with pytest.raises(ZeroDivisionError), ring.taken(rows, 0):
            raise ZeroDivisionError
    assert not any(slot.busy for slot in ring.slots)


@pytest.mark.parametrize("seed", range(6))
def test_a_part_is_its_entries_in_order(seed):
    """Uneven heads over several slabs, two parts that share memory and go on apart."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 3)
    part = HostPart(torch.device("cpu"), shape)
    plain: list[Tensor] = [torch.zeros(0, 4) for _ in range(6)]
    others: list[tuple[HostPart, list[Tensor]]] = []
    for _ in range(7):
        most = int(torch.randint(1, 300, (), generator=generator))
        lanes = [
            torch.randn(int(torch.randint(0, most, (), generator=generator)), 4, generator=generator) for _ in range(6)
        ]
        part.append(lanes, expected=int(torch.randint(0, 500, (), generator=generator)))
        plain = [torch.cat(pair) for pair in zip(plain, lanes, strict=True)]
        if torch.rand((), generator=generator) < 0.3:
            others.append((part.shared(), list(plain)))
    for found, expected in [(part, plain), *others]:
        counts = [len(lane) for lane in expected]
        assert found.counts.flatten().tolist() == counts
        assert torch.equal(found.flat(), torch.cat(expected))
        rectangle = found.rectangle()
        assert all(torch.equal(r[:n], e) for r, e, n in zip(rectangle.flatten(0, 1), expected, counts, strict=True))
        index = torch.stack([torch.randint(-1, max(n, 1) + 2, (9,), generator=generator) for n in counts]).view(2, 3, 9)
        picked = found.at(index).flatten(0, 1)
        for lane, rows, at in zip(expected, picked, index.flatten(0, 1).tolist(), strict=True):
            wanted = [lane[i] if 0 <= i < len(lane) else torch.zeros(4) for i in at]
            assert torch.equal(rows, torch.stack(wanted))
        room = sum(tensor.shape[2] for tensor in found.tensors())
        assert room <= 2.5 * max(counts) + 800
        assert found.used_nbytes == sum(counts) * 16


def test_slabs_are_powers_of_two_in_bytes():
    """torch rounds pinned memory up to one: what is asked for is what is taken."""
    part = HostPart(torch.device("cpu"), (1, 8))
    part.append([torch.zeros(1000, 16)] * 8)
    assert all(tensor.nbytes & (tensor.nbytes - 1) == 0 for tensor in part.tensors())


def test_rings_are_no_part_of_a_copy():
    ring = Ring(torch.device("cpu"))
    assert copy.deepcopy(kvfoundry.cache.Prompt()).rings.nbytes == 0 and not list(ring.tensors())


def test_refusals_name_their_reason(tiny_model, tokenizer):
    for spec, reason in {
        "minicache()+headinfer()": "share",
        "kvquant()+headinfer()": "one size",
        "think()+headinfer()": "one size",
        "headinfer()+headinfer()": "twice",
        "headinfer(group=0)": "group",
    }.items():
        with pytest.raises(SpecError, match=reason):
            kvfoundry.Method.parse(spec)
    method = kvfoundry.Method.parse("headinfer(group=2)+kivi(bits=2)")
    assert kvfoundry.Method.parse(str(method)) == method and not method.evicts
    for spec, served in (("headinfer()", True), ("h2o(budget=3, window=2)+headinfer()", False)):
        found = kvfoundry.generate(
            tiny_model("llama"), tokenizer, "w5 w6 w7 w8", spec, max_new_tokens=4, engine=True, details=True
        )
        refused = any("drops rows in decode that lie on the host" in note for note in found.notes)
        assert refused is not served and found.parked_bytes > 0
