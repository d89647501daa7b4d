"""Law 6: state lives in the cache; nothing stays on the model, the method or in transformers."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, left_padded, random_ids
from transformers import DynamicCache, PreTrainedModel

import kvfoundry
import kvfoundry.acting as acting_module
from kvfoundry.errors import KVFoundryError
from kvfoundry.layer import CacheLayer
from kvfoundry.method import Method

from .support import EVICTING, NAMES, forward_pieces, granularities, greedy, kept_average, kept_positions, small_spec


def traces(model: PreTrainedModel) -> dict[str, Any]:
    """What a wrapper could leave behind: attributes, hooks and replaced methods of every module; weights are apart."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return {
        name: (sorted(vars(module)), [len(getattr(module, hook)) for hook in hooks], type(module).forward)
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("name", NAMES)
def test_one_method_serves_generations_in_any_order(name, tiny_model):
    """B06: A then B, B then A, and B with a fresh object give the same B."""
    model, method = tiny_model("llama"), Method.parse(small_spec(name))
    a, b = random_ids(1, 40, seed=1), random_ids(1, 33, seed=2)
    greedy(model, kvfoundry.KVCache(model, method), a)
    after_a = greedy(model, kvfoundry.KVCache(model, method), b)
    other = Method.parse(small_spec(name))
    before_a = greedy(model, kvfoundry.KVCache(model, other), b)
    greedy(model, kvfoundry.KVCache(model, other), a)
    fresh = greedy(model, kvfoundry.KVCache(model, small_spec(name)), b)
    assert torch.equal(after_a, fresh) and torch.equal(before_a, fresh)


@pytest.mark.parametrize("name", NAMES)
def test_a_reset_cache_is_a_new_cache(name, tiny_model):
    """B32: length 0, memory given back, and the next prompt comes out as with a new cache."""
    model = tiny_model("gemma3")
    a, b = random_ids(1, 40, seed=1), random_ids(2, 33, seed=2)
    cache = kvfoundry.KVCache(model, small_spec(name))
    greedy(model, cache, a)
    cache.reset()
    assert cache.seen_tokens == cache.get_seq_length() == cache.nbytes == cache.peak_nbytes == 0
    again, fresh = greedy(model, cache, b), kvfoundry.KVCache(model, small_spec(name))
    assert torch.equal(again, greedy(model, fresh, b))
    assert cache.nbytes == fresh.nbytes and cache.peak_nbytes == fresh.peak_nbytes
    for row in range(2):
        assert kept_positions(cache, row) == kept_positions(fresh, row)


class Interruption(Exception):
    pass


@pytest.mark.parametrize("point", ["_store", "_act", "update"])
@pytest.mark.parametrize("layer_idx", [0, 1])
@pytest.mark.parametrize("seen", [0, 30])
def test_an_interrupted_call_is_noticed_and_reset_leads_on(point, layer_idx, seen, tiny_model, monkeypatch):
    """B06: after an exception in the middle the cache refuses to go on; reset, it equals a new one."""
    model, method = tiny_model("llama"), Method.parse("h2o(budget=12, window=4)")
    ids, b = random_ids(1, 40, seed=1), random_ids(1, 33, seed=2)
    cache = kvfoundry.KVCache(model, method)
    if seen:
        forward_pieces(model, cache, ids[:, :seen], [seen])
    original = getattr(CacheLayer, point)

    def interrupted(layer: CacheLayer, *args: Any, **kwargs: Any) -> Any:
        result = original(layer, *args, **kwargs)
        if layer.layer_idx == layer_idx:
            raise Interruption
        return result

    with monkeypatch.context() as patch:
        patch.setattr(CacheLayer, point, interrupted)
        with pytest.raises(Interruption):
            forward_pieces(model, cache, ids[:, seen:], [10])
    with pytest.raises(KVFoundryError, match=r"interrupted.*reset"):
        forward_pieces(model, cache, ids[:, :5], [5])
    expected = greedy(model, kvfoundry.KVCache(model, "h2o(budget=12, window=4)"), b)
    assert torch.equal(greedy(model, kvfoundry.KVCache(model, method), b), expected)
    cache.reset()
    assert torch.equal(greedy(model, cache, b), expected)


def test_a_refused_call_leaves_the_cache_as_it_was(tiny_model):
    """A wrong mask is refused before anything is stored; the right call then goes on."""
    model, ids = tiny_model("llama"), random_ids(1, 44)
    cache, whole = (
        kvfoundry.KVCache(model, "snapkv(budget=12, window=4)"),
        kvfoundry.KVCache(model, "snapkv(budget=12, window=4)"),
    )
    forward_pieces(model, cache, ids[:, :40], [40])
    with pytest.raises(KVFoundryError, match="attention_mask covers 12"):
        model(ids[:, 40:], torch.ones(1, 12, dtype=torch.long), None, cache)
    found = forward_pieces(model, cache, ids[:, 40:], [4])
    assert torch.equal(found, forward_pieces(model, whole, ids, [40, 4])[:, 40:])


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_left_on_the_model(family, own_model, reference_model):
    """B07: after our context the plain model is bit-equal to one that was never attached."""
    model, ids = own_model(family), random_ids(1, 40)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before, config = traces(model), copy.deepcopy(model.config.to_dict())
    implementation = model.config._attn_implementation
    with kvfoundry.attach(model):
        assert model.config._attn_implementation == "kvfoundry"
        for length in (40, 23):
            greedy(model, kvfoundry.KVCache(model, "streamingllm(budget=12, sinks=2)"), ids[:, :length])
    assert model.config._attn_implementation == implementation
    assert traces(model) == before and model.config.to_dict() == config
    after = model.state_dict()
    assert list(after) == list(weights) and all(torch.equal(after[name], tensor) for name, tensor in weights.items())
    never = reference_model(family)
    assert torch.equal(forward_pieces(model, None, ids, [40]), forward_pieces(never, None, ids, [40]))
    plain, expected = DynamicCache(config=model.config), DynamicCache(config=never.config)
    assert torch.equal(forward_pieces(model, plain, ids, [30, 1, 9]), forward_pieces(never, expected, ids, [30, 1, 9]))


def test_attach_restores_after_an_exception_and_when_nested(own_model):
    model = own_model("llama")
    with pytest.raises(Interruption), kvfoundry.attach(model):
        raise Interruption
    assert model.config._attn_implementation == "eager"
    with kvfoundry.attach(model):
        with kvfoundry.attach(model, attn_implementation="sdpa"):
            assert kvfoundry.KVCache(model).layers[0].kernel.__module__.endswith("sdpa")
        assert model.config._attn_implementation == "kvfoundry"
        assert kvfoundry.KVCache(model).layers[0].kernel.__module__.endswith("naive")
    assert model.config._attn_implementation == "eager"


def test_the_backend_is_the_one_that_the_model_was_loaded_with(own_model):
    for implementation, kernel in (("eager", "naive"), ("sdpa", "sdpa")):
        model = own_model("llama")
        model.set_attn_implementation(implementation)
        assert kvfoundry.KVCache(model).layers[0].kernel.__module__.endswith(kernel)
        assert kvfoundry.KVCache(model).layers[0].kernel.__module__.endswith(kernel)


def test_a_cache_used_after_our_attention_was_taken_away_is_refused(own_model):
    model, ids = own_model("llama"), random_ids(1, 10)
    with kvfoundry.attach(model):
        cache = kvfoundry.KVCache(model)
        forward_pieces(model, cache, ids, [10])
    with pytest.raises(KVFoundryError):
        forward_pieces(model, cache, ids, [10])


def test_two_models_and_two_caches_do_not_meet(tiny_model, own_model):
    first, second = tiny_model("llama"), own_model("qwen3")
    ids = random_ids(1, 30)
    alone = [
        forward_pieces(model, kvfoundry.KVCache(model, spec), ids, [20, 5, 5])
        for model, spec in ((first, "tova(budget=8)"), (second, "snapkv(budget=9, window=4)"))
    ]
    caches = [kvfoundry.KVCache(first, "tova(budget=8)"), kvfoundry.KVCache(second, "snapkv(budget=9, window=4)")]
    mixed: list[list[torch.Tensor]] = [[], []]
    for start, size in ((0, 20), (20, 5), (25, 5)):
        for i, model in enumerate((first, second)):
            mixed[i].append(forward_pieces(model, caches[i], ids[:, start : start + size], [size]))
    assert torch.equal(torch.cat(mixed[0], dim=1), alone[0]) and torch.equal(torch.cat(mixed[1], dim=1), alone[1])


@pytest.mark.parametrize("name", EVICTING)
def test_the_prompt_is_compressed_once_and_decode_grows_by_one(name, tiny_model):
    """B08: prompt 40, capacity 64, 100 tokens; then five tokens at once."""
    model, method = tiny_model("llama"), Method.parse(small_spec(name, 64))
    cache, ids = kvfoundry.KVCache(model, method), random_ids(1, 145)
    forward_pieces(model, cache, ids, [40])
    assert cache.layers[0].lengths.tolist() == [[40, 40]]
    for step in range(1, 101):
        forward_pieces(model, cache, ids[:, 39 + step :], [1])
        every = method.schedule.every
        most = 40 + step if every is None else min(40 + step, 64 + every - 1)
        assert cache.layers[0].lengths.max() == most or (every and 64 <= int(cache.layers[0].lengths.max()) <= most)
    forward_pieces(model, cache, ids[:, 140:], [5])
    assert cache.seen_tokens == 145
    assert int(cache.layers[0].lengths.max()) <= (
        145 if method.schedule.every is None else 64 + method.schedule.every - 1
    )


@pytest.mark.parametrize("name", EVICTING)
def test_a_prompt_above_its_budget_is_compressed_exactly_once(name, tiny_model, monkeypatch):
    """B08: decode of one and of several tokens is never taken for another prompt."""
    model, method = tiny_model("llama"), Method.parse(small_spec(name, 12))
    if method.schedule.every is not None:
        pytest.skip(f"{name} also acts in decode")
    evictions = []
    evict = acting_module.evict
    monkeypatch.setattr(acting_module, "evict", lambda *args: evictions.append(1) or evict(*args))
    cache = kvfoundry.KVCache(model, method)
    ids = random_ids(1, 60)
    forward_pieces(model, cache, ids, [40])
    after_prompt = [layer.lengths for layer in cache.attention_layers]
    assert 12 - 4 < kept_average(cache) <= 12
    forward_pieces(model, cache, ids[:, 40:], [1, 5, 1, 13])
    assert len(evictions) == len(cache.attention_layers)
    for layer, lengths in zip(cache.attention_layers, after_prompt, strict=True):
        assert torch.equal(layer.lengths, lengths + 20)


def test_importing_changes_neither_registry():
    """Importing kvfoundry, all of it, enters nothing into transformers; the first attach does."""
    program = """
import transformers, pkgutil, importlib
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
def snapshot():
    return [sorted(AttentionInterface._global_mapping), sorted(AttentionMaskInterface._global_mapping),
            sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()), sorted(DYNAMIC_LAYER_TYPE_MAPPING)]
before = snapshot()
import kvfoundry
kvfoundry.KVCache, kvfoundry.Method, kvfoundry.attach, kvfoundry.generate, kvfoundry.methods()
import kvfoundry.cache, kvfoundry.layer, kvfoundry.attention, kvfoundry.prompt_mask, kvfoundry.generation
assert snapshot() == before, "importing changed a registry"
"""
    run = subprocess.run([sys.executable, "-c", program], env=dict(os.environ), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_importing_the_package_does_not_import_torch():
    program = "import sys, kvfoundry; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", program], env=dict(os.environ), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", NAMES)
def test_repeat_select_and_reorder_move_everything_of_a_row(name, tiny_model):
    """B33: equal to a cache that was built on the rows in that order, also in the steps that follow."""
    model, spec = tiny_model("gemma2"), small_spec(name)
    ids, mask = left_padded([30, 21, 26])
    more, more_mask = random_ids(3, 12, seed=4), torch.ones(3, 12, dtype=torch.long)

    def run(order: list[int] | None, act: Any) -> torch.Tensor:
        chosen = ids if order is None else ids[order]
        chosen_mask = mask if order is None else mask[order]
        cache = kvfoundry.KVCache(model, spec)
        forward_pieces(model, cache, chosen, [30], chosen_mask)
        rows = act(cache)
        following = torch.cat([mask[rows], more_mask[rows]], dim=1)
        return forward_pieces(model, cache, more[rows], [1, 1, 5, 1, 4], following)

    for order, act in (
        ([2, 0, 0], lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0]))),
        ([0, 0, 1, 1, 2, 2], lambda cache: cache.batch_repeat_interleave(2)),
        ([1], lambda cache: cache.batch_select_indices(torch.tensor([1]))),
    ):
        found = run(None, lambda cache, act=act, order=order: (act(cache), order)[1])
        expected = run(order, lambda cache, order=order: order)
        assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(("name", "given"), granularities(NAMES))
def test_a_document_cache_answers_many_questions_unchanged(name, given, tiny_model):
    """B38: five questions in two orders on forks; the document's bytes, length and answers do not change."""
    model = tiny_model("gemma3")
    document = kvfoundry.KVCache(model, small_spec(name, **given))
    forward_pieces(model, document, random_ids(1, 40), [40])

    def state() -> list[Any]:
        return [(layer.seen, layer.keys.clone(), layer.values.clone(), layer.positions) for layer in document.layers]

    before, questions = state(), [random_ids(1, 3 + i, seed=50 + i) for i in range(5)]

    def ask(i: int) -> torch.Tensor:
        fork = document.fork()
        assert fork.nbytes == document.nbytes
        return forward_pieces(model, fork, questions[i], [2] + [1] * i + [1])

    expected = []
    for i in range(5):
        alone = kvfoundry.KVCache(model, small_spec(name, **given))
        forward_pieces(model, alone, random_ids(1, 40), [40])
        expected.append(forward_pieces(model, alone, questions[i], [2] + [1] * i + [1]))
    for i in [0, 1, 2, 3, 4, 3, 0, 4, 1, 2]:
        assert torch.equal(ask(i), expected[i])
        for (seen, *tensors), (then, *others) in zip(state(), before, strict=True):
            assert seen == then and all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def test_a_fork_of_a_fork_and_the_original_go_their_own_ways(tiny_model):
    model, ids = tiny_model("llama"), random_ids(3, 8, seed=60)
    root = kvfoundry.KVCache(model)
    forward_pieces(model, root, random_ids(1, 30), [30])
    child = root.fork()
    grandchild = child.fork()
    found = [
        torch.cat([forward_pieces(model, cache, ids[i : i + 1, j : j + 1], [1]) for j in range(8)], dim=1)
        for i, cache in enumerate((root, grandchild, child))
    ]
    for i in range(3):
        alone = kvfoundry.KVCache(model)
        forward_pieces(model, alone, random_ids(1, 30), [30])
        assert torch.equal(found[i], forward_pieces(model, alone, ids[i : i + 1], [1] * 8))


def test_a_deep_copy_is_independent(tiny_model):
    model, ids = tiny_model("gemma3"), random_ids(1, 30)
    cache = kvfoundry.KVCache(model, "h2o(budget=12, window=4)")
    forward_pieces(model, cache, ids, [20])
    twin = copy.deepcopy(cache)
    first = forward_pieces(model, cache, ids[:, 20:], [1] * 10)
    assert torch.equal(first, forward_pieces(model, twin, ids[:, 20:], [1] * 10))


def test_a_cache_filled_in_inference_mode_goes_on_outside_of_it(tiny_model):
    """kvfoundry.generate works in inference mode, model.generate does not: one cache may see both."""
    model, ids = tiny_model("llama"), random_ids(1, 40)
    for spec in ("fullkv", "h2o(budget=12, window=4)", "streamingllm(budget=12, sinks=2)"):
        cache, whole = kvfoundry.KVCache(model, spec), kvfoundry.KVCache(model, spec)
        forward_pieces(model, cache, ids, [30, 1])
        with torch.no_grad():
            found = [model(ids[:, i : i + 1], None, None, cache).logits for i in range(31, 40)]
        expected = forward_pieces(model, whole, ids, [30] + [1] * 10)
        assert torch.equal(torch.cat(found, dim=1), expected[:, 31:])
