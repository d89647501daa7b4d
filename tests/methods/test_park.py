"""park: what leaves the device comes back as it was, and what follows a recall is what it claims to be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from laws.replay import Recorder
from laws.support import EVICTING, METHODS, forward_pieces, granularities, small_spec
from tiny_models import QUERY_HEADS, left_padded, random_ids
from torch import Tensor

import kvfoundry
from kvfoundry.errors import CacheStateError, SpecError
from kvfoundry.layer import CacheLayer
from kvfoundry.layouts.base import RowsView
from kvfoundry.layouts.parked import ParkedRows
from kvfoundry.method import Method

from .support import rows

LENGTHS = [40, 23, 9]
SNAP = "snapkv(budget=12, window=4, kernel=3)+park()"
# Every method that drops rows and leaves nothing of them in others.
PARKING = [
    (name, given)
    for name, given in granularities(EVICTING)
    if kvfoundry.methods()[name].kind == "method" and METHODS[name].dispose is None
]


def parking(name: str, budget: int | float = 12, **given: Any) -> str:
    return f"{small_spec(name, budget, **given)}+park()"


def words(count: int, seed: int) -> str:
    return " ".join(f"w{i}" for i in random_ids(count, seed=seed).tolist())


def assert_same_rows(found: kvfoundry.KVCache, expected: kvfoundry.KVCache) -> None:
    """Bit for bit, in the same memory."""
    for layer, other in zip(found.attention_layers, expected.attention_layers, strict=True):
        assert torch.equal(layer.positions, other.positions) and torch.equal(layer.lengths, other.lengths)
        assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)
    assert found.nbytes == expected.nbytes and found.parked_nbytes == 0


class Shadow:
    """Every row that a layer of a cache was ever given, per batch row: what must never be lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: kvfoundry.KVCache, batch: int):
        self.cache = cache
        # Keys beside values, [tokens, heads, 2 dim] of every batch row.
        self.held = {id(layer): [torch.empty(0, 2, 32)] * batch for layer in cache.layers}
        store = CacheLayer._store

        def noted(layer: CacheLayer, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor | None) -> None:
            new = torch.cat([keys, values], dim=3).transpose(1, 2)
            real = (positions >= 0).sum(dim=1).tolist()
            lists = self.held[id(layer)]
            self.held[id(layer)] = [torch.cat([old, new[i, : real[i]]]) for i, old in enumerate(lists)]
            store(layer, keys, values, positions, counts)

        monkeypatch.setattr(CacheLayer, "_store", noted)

    def reorder(self, indices: list[int]) -> None:
        self.held = {name: [rows[i] for i in indices] for name, rows in self.held.items()}

    def check(self) -> None:
        """Kept and parked rows of every head are all rows, each once, and each as it was stored; both are in order."""
        for layer in self.cache.layers:
            views = [view for view in (layer.rows.view(), layer.parked) if view is not None]
            for row, stored in enumerate(self.held[id(layer)]):
                groups = layer.lengths.shape[1] // stored.shape[1]
                for head in range(layer.lengths.shape[1]):
                    parts = []
                    for view in views:
                        count = int(view.lengths[row, head])
                        positions = view.head_positions[row, head, :count].long()
                        assert bool((positions.diff() > 0).all())
                        found = torch.cat([rows[row, head, :count] for rows in (view.keys, view.values)], dim=1)
                        assert torch.equal(found, stored[positions, head // groups])
                        parts.append(positions)
                    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(stored)))


@pytest.mark.parametrize(("name", "given"), PARKING)
def test_recall_after_the_prompt_is_never_having_dropped(name, given, tiny_model):
    """A padded batch: rows, bytes, logits of one and of several tokens are those of the full cache, bit for bit."""
    model = tiny_model("llama")
    ids, mask = left_padded(LENGTHS)
    full, cache = kvfoundry.KVCache(model), kvfoundry.KVCache(model, parking(name, **given))
    for each in (full, cache):
        forward_pieces(model, each, ids, [40], mask)
    assert cache.parked_nbytes > 0 and all(int(layer.lengths.max()) < 40 for layer in cache.layers)
    cache.recall()
    assert_same_rows(cache, full)
    more, more_mask = random_ids(3, 14, seed=4), torch.cat([mask, torch.ones(3, 14, dtype=torch.long)], dim=1)
    found, expected = (forward_pieces(model, each, more, [1, 1, 6, 1, 5], more_mask) for each in (cache, full))
    assert torch.equal(found, expected)
    assert_same_rows(cache, full)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss", "phi3"])
def test_the_text_is_that_of_the_full_cache(family, tiny_model, tokenizer):
    """One document, asked on forks and in place: as from a cache that never dropped anything."""
    model, document = tiny_model(family), words(60, 1)
    full = kvfoundry.prefill(model, tokenizer, document)
    cache = kvfoundry.prefill(model, tokenizer, document, SNAP)
    size = cache.nbytes, cache.parked_nbytes
    assert 0 < size[0] < full.nbytes and size[1] > 0
    for seed in (2, 3):
        question = words(5, seed)
        expected = kvfoundry.generate(model, tokenizer, question, cache=full.fork(), max_new_tokens=16)
        fork = cache.fork()
        fork.recall()
        assert kvfoundry.generate(model, tokenizer, question, cache=fork, max_new_tokens=16) == expected
        assert (cache.nbytes, cache.parked_nbytes) == size
    cache.recall()
    assert kvfoundry.generate(model, tokenizer, question, cache=cache, max_new_tokens=16) == expected


def test_a_prompt_in_pieces_that_is_evicted_at_its_end_comes_back_exactly(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 70)
    full, cache = (kvfoundry.KVCache(model, spec) for spec in (None, f"{SNAP}+schedule(prefill='end')"))
    for each in (full, cache):
        each.expect_prompt(60)
        forward_pieces(model, each, ids[:, :60], [16, 16, 16, 12])
    assert cache.kept_rows == 12
    cache.recall()
    found, expected = (forward_pieces(model, each, ids[:, 60:], [1, 9]) for each in (cache, full))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("name", "given"), PARKING)
def test_kept_and_parked_rows_are_all_rows(name, given, tiny_model, monkeypatch):
    """B33: prompt in pieces, decode, batch rows reordered, repeated and selected in between; then all of it at once."""
    model, base = tiny_model("llama"), METHODS[name]
    spec = parking(name, **given)
    if base.schedule.every is None:
        spec += "+schedule(every=2)"
    cache = kvfoundry.KVCache(model, spec)
    shadow = Shadow(monkeypatch, cache, 3)
    ids, mask = left_padded([48, 31, 12])
    cache.expect_prompt(48)
    forward_pieces(model, cache, ids, [20, 20, 8], mask)
    shadow.check()

    def order(indices: list[int], act: Any) -> None:
        nonlocal mask
        act(cache)
        shadow.reorder(indices)
        mask = mask[indices]
        shadow.check()

    def decode(steps: list[int], seed: int) -> None:
        nonlocal mask
        mask = torch.cat([mask, torch.ones(len(mask), sum(steps), dtype=torch.long)], dim=1)
        forward_pieces(model, cache, random_ids(len(mask), sum(steps), seed=seed), steps, mask)
        shadow.check()

    decode([1] * 5, 2)
    order([2, 0, 0], lambda each: each.reorder_cache(torch.tensor([2, 0, 0])))
    decode([1, 3, 1], 3)
    order([0, 0, 1, 1, 2, 2], lambda each: each.batch_repeat_interleave(2))
    decode([1, 1], 4)
    order([3, 0], lambda each: each.batch_select_indices(torch.tensor([3, 0])))
    decode([1] * 4, 5)
    cache.recall()
    assert cache.parked_nbytes == 0 and cache.kept_share == 1.0
    shadow.check()
    heads = {layer.lengths.shape[1] for layer in cache.layers}
    assert heads == {2}  # sets per query head have become equal, and are stored once


@pytest.mark.parametrize(("name", "given"), PARKING)
def test_after_a_recall_everything_is_read_as_it_was_computed(name, given, tiny_model, reference_model):
    """Rows that were computed after an eviction stay what they are: the replay has each token see what it saw then."""
    model, ids = tiny_model("llama"), random_ids(1, 64, seed=9)
    cache = kvfoundry.KVCache(model, parking(name, **given))
    cache.expect_prompt(40)
    recorder = Recorder(model, cache, 64)
    logits = [recorder.feed(ids[:, start : start + 20]) for start in (0, 20)]
    logits += [recorder.feed(ids[:, i : i + 1]) for i in range(40, 46)]
    cache.recall()
    logits += [recorder.feed(ids[:, start:stop]) for start, stop in ((46, 47), (47, 52), (52, 53))]
    assert all(bool(visible[0, :, 52, :53].all()) for visible in recorder.visible)
    cache.recall(act_again=True)  # and the method goes back to work
    logits += [recorder.feed(ids[:, start:stop]) for start, stop in ((53, 61), (61, 62), (62, 64))]
    assert cache.kept_rows < 24 and cache.parked_nbytes > 0
    expected = recorder.replayed(reference_model("llama"), ids)
    assert float((torch.cat(logits, dim=1) - expected).abs().max()) < 1e-4


@pytest.mark.parametrize(("name", "given"), PARKING)
def test_acting_again_chooses_as_if_all_had_been_one_prompt(name, given, tiny_model):
    """Document, recall, question: kept rows and all that follows are those of one prompt that is evicted at its end."""
    model, ids, base = tiny_model("llama"), random_ids(1, 66, seed=7), METHODS[name]
    spec = f"{small_spec(name, **given)}+schedule(prefill='end', every={base.schedule.every})"
    plain, cache = kvfoundry.KVCache(model, spec), kvfoundry.KVCache(model, f"{spec}+park()")
    plain.expect_prompt(60)
    forward_pieces(model, plain, ids[:, :60], [48, 12])
    forward_pieces(model, cache, ids[:, :48], [48])
    cache.recall(act_again=True)
    assert cache.awaits_prompt and cache.kept_share == 1.0 and cache.notes == []
    forward_pieces(model, cache, ids[:, 48:60], [12])
    assert cache.kept_rows == plain.kept_rows and cache.parked_nbytes > 0
    assert base.score is not None
    if base.score.accumulates and base.schedule.every is None:
        return  # sums over queries end with the prompt that they served, and begin anew
    found, expected = (forward_pieces(model, each, ids[:, 60:], [1, 1, 3, 1]) for each in (cache, plain))
    assert torch.equal(found, expected)
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(layer.positions, other.positions) and torch.equal(layer.keys, other.keys)


def test_a_second_question_is_answered_from_its_own_choice_of_rows(tiny_model, tokenizer):
    """generate(..., cache=cache) after recall(act_again=True): at once, in pieces, and again for a third question."""
    model, document, questions = tiny_model("qwen3"), words(60, 1), [words(9, seed) for seed in (2, 3, 4)]
    whole = f"{document} {questions[0]}"
    expected = kvfoundry.generate(model, tokenizer, whole, "snapkv(budget=12, window=4, kernel=3)", 8, details=True)
    for pieces in (None, 4):
        cache = kvfoundry.prefill(model, tokenizer, document, f"{SNAP}+schedule(prefill='end')")
        cache.recall(act_again=True)
        options: dict[str, Any] = dict(cache=cache, max_new_tokens=8, details=True)
        found = kvfoundry.generate(model, tokenizer, questions[0], prefill_chunk=pieces, **options)
        assert found.token_ids == expected.token_ids and found.kept_rows == 12
        assert found.stored_bytes == expected.stored_bytes
    kept = [cache.layers[1].positions.tolist()]
    for question in questions[1:]:
        seen = cache.seen_tokens
        cache.recall(act_again=True)
        answer = kvfoundry.generate(model, tokenizer, question, **options)
        rows_parked = sum(int(layer.parked.lengths.sum()) for layer in cache.layers)
        assert answer.kept_rows == 12 and rows_parked == (seen + 9 - 12) * 2 * 2
        assert answer.parked_bytes == cache.parked_nbytes == rows_parked * (2 * 16 * 4 + 4)
        kept.append(cache.layers[1].positions.tolist())
    assert kept[0] != kept[1] != kept[2]


@pytest.mark.parametrize("given", [{}, {"granularity": "query_head"}])
def test_statistics_come_back_with_their_rows(given, tiny_model):
    """What h2o has summed up for a row while it was on the device; later attention is not added in its absence."""
    model, ids = tiny_model("llama"), random_ids(2, 40)
    whole, cache = (
        kvfoundry.KVCache(model, small_spec("h2o", 64, **given)),
        kvfoundry.KVCache(model, parking("h2o", **given)),
    )
    for each in (whole, cache):
        forward_pieces(model, each, ids, [40])
    cache.recall(act_again=True)
    for layer, other in zip(cache.layers, whole.layers, strict=True):
        found, expected = (each.rows.view().columns["attention_sum"] for each in (layer, other))
        assert found.shape == expected.shape and torch.equal(found, expected)


def test_a_method_rests_until_it_is_told_to_act(tiny_model):
    """Also one that evicts at every token; resting ends with act_again or with reset, and is noted."""
    model, ids = tiny_model("llama"), random_ids(1, 80)
    cache = kvfoundry.KVCache(model, "tova(budget=8)+park()")
    cache.recall()  # an empty cache has nothing to recall, and stays as it is
    forward_pieces(model, cache, ids[:, :31], [30, 1])
    assert cache.kept_rows == 8 and "host memory" in cache.notes[0] and len(cache.notes) == 1
    cache.recall()
    forward_pieces(model, cache, ids[:, 31:50], [1] * 10 + [9])
    assert cache.kept_rows == 50 and ["rests since recall()" in note for note in cache.notes] == [True]
    with pytest.raises(CacheStateError, match="before the prompt has ended"):
        cache.expect_prompt(10)
    twin = cache.fork()
    cache.recall(act_again=True)
    cache.expect_prompt(10)
    forward_pieces(model, cache, ids[:, 50:62], [5, 5, 1, 1])
    assert cache.kept_rows == 8
    forward_pieces(model, twin, ids[:, 50:62], [5, 5, 1, 1])
    assert twin.kept_rows == 62
    twin.reset()
    forward_pieces(model, twin, ids, [30, 1])
    assert twin.kept_rows == 8 and twin.seen_tokens == 31


def test_a_prompt_within_the_budget_can_be_recalled_too(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 30)
    cache = kvfoundry.KVCache(model, "tova(budget=16)+park()")
    forward_pieces(model, cache, ids, [10])
    assert cache.parked_nbytes == 0 and cache.layers[0].parked is None and "within its budget" in cache.notes[0]
    cache.recall()
    forward_pieces(model, cache, ids[:, 10:], [1] * 20)
    assert cache.kept_rows == 30


def test_statistics_that_nobody_needs_any_more_take_no_memory(tiny_model):
    """Of a method that acts in the prompt alone, parked or not; and of one that rests, whether it parked or not."""
    model, ids = tiny_model("llama"), random_ids(1, 40)
    full = kvfoundry.KVCache(model)
    forward_pieces(model, full, ids, [40])
    once = kvfoundry.KVCache(model, "h2o(budget=12, window=4)+schedule(prefill='chunk')+park()")
    once.expect_prompt(40)
    forward_pieces(model, once, ids, [20, 20])
    assert once.parked_nbytes == 28 * 2 * 2 * (2 * 16 * 4 + 4) and once.nbytes == 12 * 2 * 2 * (2 * 16 * 4 + 2)
    for budget in (12, 64):
        resting = kvfoundry.KVCache(model, f"h2o(budget={budget}, window=4)+park()")
        forward_pieces(model, resting, ids, [40])
        resting.recall()
        assert resting.nbytes == full.nbytes


def test_forks_and_copies_go_their_own_ways(tiny_model):
    """B38: neither side's parking, recalling or reordering reaches the other; what is parked is shared, not copied."""
    model, ids = tiny_model("llama"), random_ids(2, 60)
    root = kvfoundry.KVCache(model, "h2o(budget=12, window=4)+park()")
    forward_pieces(model, root, ids[:, :40], [40])

    def state(cache: kvfoundry.KVCache) -> list[Tensor]:
        views = [view for layer in cache.layers for view in (layer.rows.view(), layer.parked)]
        return [tensor.clone() for view in views for tensor in (view.keys, view.values, view.head_positions)]

    before, size = state(root), (root.nbytes, root.parked_nbytes)
    for twin in (root.fork(), copy.deepcopy(root)):
        assert (twin.nbytes, twin.parked_nbytes) == size
        theirs = {tensor.data_ptr() for layer in twin.layers for tensor in layer.parked_tensors()}
        assert theirs == {tensor.data_ptr() for layer in root.layers for tensor in layer.parked_tensors()}
        forward_pieces(model, twin, ids[:, 40:], [1] * 10)
        twin.batch_select_indices(torch.tensor([1]))
        twin.recall()
        forward_pieces(model, twin, ids[1:, 50:], [1] * 10)
        assert twin.kept_rows == 60
        assert all(torch.equal(a, b) for a, b in zip(state(root), before, strict=True))
        assert (root.nbytes, root.parked_nbytes) == size
    forward_pieces(model, root, ids[:, 40:], [1] * 10)
    assert root.parked_nbytes > size[1]


def test_crop_is_refused_while_rows_are_parked_and_exact_when_they_are_back(tiny_model):
    """B35: after a recall tokens can be taken back as from a full cache, and transformers is told so."""
    model, ids = tiny_model("llama"), random_ids(1, 12, seed=13).repeat(1, 4)
    cache, full = kvfoundry.KVCache(model, "tova(budget=8)+park()"), kvfoundry.KVCache(model)
    for each in (cache, full):
        forward_pieces(model, each, ids[:, :40], [40])
    with pytest.raises(CacheStateError, match="cannot take tokens back"):
        cache.crop(-5)
    with pytest.raises(ValueError, match=r"crop|cannot take tokens back|rollback|roll back|take tokens back"):
        model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache.fork(), max_new_tokens=20, do_sample=False,
            prompt_lookup_num_tokens=5, pad_token_id=0,
        )  # fmt: skip
    cache.recall()
    for each in (cache, full):
        each.crop(-5)
    assert cache.seen_tokens == 35
    found, expected = (forward_pieces(model, each, ids[:, 35:40], [1, 4]) for each in (cache, full))
    assert torch.equal(found, expected)
    assert all(layer.is_croppable for layer in cache.layers)


def test_beams_recall_what_belongs_to_their_own_tokens(tiny_model):
    """B33: after a beam search every beam holds, kept and parked, the rows of its own sequence."""
    model, ids = tiny_model("llama"), random_ids(1, 30, seed=11)
    cache = kvfoundry.KVCache(model, "h2o(budget=10, window=4)+park()")
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=12, num_beams=4,
        num_return_sequences=4, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    cache.recall()
    assert cache.layers[0].keys.shape[:3] == (4, 2, 41)
    # Keys of the first layer depend on the token and its place alone, so they tell which sequence a row is of.
    # The cache keeps the running beams; those that came out finished are among them, in the search's own order.
    alone = kvfoundry.KVCache(model)
    forward_pieces(model, alone, output[:, :41], [41])
    held = [layer.keys for layer in (cache.layers[0], alone.layers[0])]
    for beam in held[1]:
        assert any(torch.allclose(beam, other, atol=1e-5) for other in held[0])


def test_window_layers_keep_their_own_rule(tiny_model):
    model, ids = tiny_model("gemma2"), random_ids(1, 300)
    full, cache = kvfoundry.KVCache(model), kvfoundry.KVCache(model, SNAP)
    for each in (full, cache):
        forward_pieces(model, each, ids, [290])
    assert cache.layers[0].parked is None and cache.layers[1].parked is not None
    cache.recall()
    assert_same_rows(cache, full)


def test_pages_are_bounded_anew_over_recalled_rows(tiny_model):
    """quest reads pages of whatever is stored: after a recall, of all rows."""
    model, ids = tiny_model("llama"), random_ids(1, 70)
    reading = "quest(budget=16, page=4, skip_layers=0)"
    plain, cache = (
        kvfoundry.KVCache(model, reading),
        kvfoundry.KVCache(model, f"snapkv(budget=24, window=4)+{reading}+park()"),
    )
    for each in (plain, cache):
        forward_pieces(model, each, ids[:, :50], [50])
    forward_pieces(model, cache, ids[:, 66:], [1] * 4)
    cache.recall()
    cache.crop(-4)
    found, expected = (forward_pieces(model, each, ids[:, 50:], [1] * 20) for each in (cache, plain))
    assert torch.equal(found, expected)


def test_a_window_that_hides_the_row_leaving_it_stops_hiding_at_rest(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 50)
    full, cache = kvfoundry.KVCache(model), kvfoundry.KVCache(model, "h2o(budget=12, window=4, leaving='skip')+park()")
    for each in (full, cache):
        forward_pieces(model, each, ids[:, :40], [40])
    cache.recall()
    found, expected = (forward_pieces(model, each, ids[:, 40:], [1] * 10) for each in (cache, full))
    assert torch.equal(found, expected)


def test_the_second_pass_of_kvzip_parks_and_can_be_run_again(own_model, tokenizer):
    model, document, question = own_model("llama"), words(40, 1), words(5, 2)
    full = kvfoundry.prefill(model, tokenizer, document)
    cache = kvfoundry.prefill(model, tokenizer, document, "kvzip(budget=10, chunk=16, overlap=3, sinks=2)+park()")
    assert cache.kept_rows == 10 and cache.parked_nbytes > 0
    twin = cache.fork()
    with pytest.raises(SpecError, match=r"repeats the whole context.*compress_by_reconstruction"):
        cache.recall(act_again=True)
    assert cache.kept_rows == 10
    cache.recall()
    assert_same_rows(cache, full)
    ids = tokenizer(document, return_tensors="pt")["input_ids"]
    again = cache.fork()
    kvfoundry.compress_by_reconstruction(model, tokenizer, again, ids)
    for layer, other in zip(again.layers, twin.layers, strict=True):
        assert torch.equal(layer.positions, other.positions) and torch.equal(layer.keys, other.keys)
    assert not again.notes[0].endswith("dropped.") and again.parked_nbytes == twin.parked_nbytes
    texts = [kvfoundry.generate(model, tokenizer, question, cache=each, max_new_tokens=12) for each in (cache, full)]
    assert texts[0] == texts[1]


def test_compress_shows_what_it_parked():
    """One layer by hand: kept and parked rows are the prompt's, the padding of a shorter row is nowhere."""
    query, key, value = rows(2, QUERY_HEADS, 2, 40)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :15] = 0
    layer = Method.parse(SNAP).compress(query, key, value, attention_mask=mask)
    assert layer.parked.lengths.tolist() == [[28, 28], [13, 13]]
    assert layer.parked_nbytes == int(layer.parked.lengths.sum()) * (2 * 16 * 4 + 4)
    for row, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        count = int(layer.parked.lengths[row, head])
        positions = layer.parked.positions[row, head]
        assert (positions[count:] == -1).all() and not layer.parked.keys[row, head, count:].any()
        kept = [p for p in layer.positions[row, head].tolist() if p >= 0]
        assert sorted(kept + positions[:count].tolist()) == list(range(40 - 15 * row))
        assert torch.equal(layer.parked.values[row, head, :count], value[row, head, positions[:count] + 15 * row])
    layer.recall()
    assert torch.equal(layer.keys[0], key[0]) and torch.equal(layer.values[1, :, :25], value[1, :, 15:])
    with pytest.raises(SpecError, match="parks no rows"):
        Method.parse("snapkv(budget=12, window=4)").compress(query, key, value).recall()


def test_many_evictions_make_few_parcels():
    """B41, the kind: a row per token for 500 tokens; no memory beyond the rows, and a parcel for each binary digit."""
    layer = Method.parse("tova(budget=8)+park()").compress(*rows(1, 4, 2, 8))
    for step in range(500):
        layer.step(*rows(1, 4, 2, 1, seed=step + 1))
    parcels = layer._acting.parked.parcels
    assert len(parcels) <= 10 and layer.parked_nbytes == 500 * 2 * (2 * 16 * 4 + 4)
    assert layer.parked.lengths.tolist() == [[500, 500]] and bool((layer.parked.positions.diff() > 0).all())


def test_rows_of_sequences_that_left_the_batch_free_the_host():
    parked, kept = ParkedRows(), rows(4, 2, 2, 10)
    view = RowsView(kept[1], kept[2], torch.arange(10).expand(4, 1, -1), torch.full((4, 2), 10))
    leaving = (torch.arange(10) % 2 == 0).expand(4, 2, -1)
    parked = parked.joined_by(view, leaving, torch.full((4, 2), 5))

    def size(rows: ParkedRows) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in rows.tensors())

    beams = parked.selected(torch.tensor([3, 3, 3, 3]))
    assert size(beams) == size(parked)  # shared, not repeated
    one = parked.selected(torch.tensor([2]))
    assert size(one) == size(parked) // 4
    assert torch.equal(one.view().keys[0], view.keys[2][:, ::2]) and torch.equal(
        beams.view().values[1], view.values[3][:, ::2]
    )


def test_two_parts_that_do_not_fit_are_noticed(tiny_model):
    """B33: never a cache with a hole in it."""
    model, ids = tiny_model("llama"), random_ids(1, 40)
    cache = kvfoundry.KVCache(model, SNAP)
    forward_pieces(model, cache, ids, [40])
    layer = cache.layers[1]
    layer.rows = layer.rows.truncated(layer.lengths - 1)
    with pytest.raises(CacheStateError, match="40"):
        cache.recall()


def test_recall_after_an_interrupted_pass_is_refused(tiny_model, monkeypatch):
    model, ids = tiny_model("llama"), random_ids(1, 40)
    cache = kvfoundry.KVCache(model, SNAP)
    forward_pieces(model, cache, ids, [30])

    class Interruption(Exception):
        pass

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise Interruption

    with monkeypatch.context() as patch:
        patch.setattr(CacheLayer, "_store", interrupted)
        with pytest.raises(Interruption):
            forward_pieces(model, cache, ids[:, 30:], [10])
    with pytest.raises(CacheStateError, match="interrupted"):
        cache.recall()


REFUSED = {
    "park()": "only refines",
    "fullkv+park()": "nothing to act on",
    "int4+park()": "nothing to act on",
    "quest(budget=64)+park()": "nothing to act on",
    "minicache+park()": "nothing to act on",
    "minicache+snapkv(budget=64)+park()": "minicache",
    "snapkv(budget=64)+park()+kivi()": "a codec rounds those that stay",
    "snapkv(budget=64)+park()+think()": "a codec rounds those that stay",
    "h2o(budget=64)+int8()+park()": "a codec rounds those that stay",
    "streamingllm(budget=64, positions=slot)+park()": "slot positions",
    "cam(budget=64)+park()": "both set dispose",
    "snapkv(budget=64)+park()+pivot_merge()": "both set dispose",
    "snapkv(budget=64)+park()+park()": "given twice",
    "snapkv(budget=64)+park(most=3)": "unknown parameter",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_what_park_does_not_go_with_is_refused_by_name(spec):
    with pytest.raises(SpecError) as caught:
        Method.parse(spec)
    assert REFUSED[spec] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["fullkv", "snapkv(budget=16, window=4)", "int4"])
def test_a_method_that_does_not_park_has_nothing_to_recall(spec, tiny_model):
    with pytest.raises(SpecError, match=r"parks no rows.*park\(\)"):
        kvfoundry.KVCache(tiny_model("llama"), spec).recall()


@pytest.mark.embedded
def test_a_fact_that_was_dropped_is_found_again_after_a_recall() -> None:
    """A document compressed to 32 rows before its question is known: lost there, and back as in the full cache."""
    model, tokenizer = kvfoundry.load("smollm2", device="cpu")
    plain = ["The sea was calm that day.", "A ferry left the harbour at noon.", "Gulls slept on the warm roof.",
             "Nobody hurried along the pier.", "The baker swept the street."]  # fmt: skip
    lines = [plain[i * 7 % 5] for i in range(45)]
    lines[20] = "The lighthouse keeper grows blue tomatoes in his cellar."
    document = "Read this report.\n" + " ".join(lines)
    question = "\nQuestion: What does the lighthouse keeper grow in his cellar?\nAnswer: The lighthouse keeper grows"
    full = kvfoundry.prefill(model, tokenizer, document)
    cache = kvfoundry.prefill(model, tokenizer, document, "snapkv(budget=32, window=16)+park()")
    assert cache.nbytes < full.nbytes / 5

    def answer(cache: kvfoundry.KVCache) -> str:
        return kvfoundry.generate(model, tokenizer, question, cache=cache, max_new_tokens=4)

    assert "tomatoes" not in answer(cache.fork())
    back, anew = cache.fork(), cache.fork()
    back.recall()
    found, expected = answer(back), answer(full)
    assert found == expected and "blue tomatoes" in found
    anew.recall(act_again=True)
    assert "blue tomatoes" in answer(anew) and anew.nbytes < full.nbytes / 5
