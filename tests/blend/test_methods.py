"""A blended cache is an ordinary one: it decodes, forks, crops, and any method goes on from it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from laws.support import METHODS, keeps_exactly
from tiny_models import random_ids
from torch import Tensor
from transformers import PreTrainedModel

import kvfoundry
from kvfoundry import compat
from kvfoundry.blend import blend_chunks
from kvfoundry.chunks import ChunkKV
from kvfoundry.errors import SpecError

from .support import asked, passages, read_all

Models = Callable[..., PreTrainedModel]
LENGTHS, QUESTION = (12, 15, 18), random_ids(6, seed=99)
# What merges layers, repeats the context, or needs every token's query.
APART = {name for name, method in METHODS.items() if method.reconstructs is not None or method.pairs is not None}
APART |= {name for name, method in METHODS.items() if method.score is not None and method.score.needs_every_query}


def steps(model: PreTrainedModel, cache: kvfoundry.KVCache, first: Tensor, count: int = 6) -> list[int]:
    """Greedy tokens from the logits of the newest token on."""
    tokens = [int(first.argmax())]
    for _ in range(count):
        ids = torch.tensor([tokens[-1:]])
        tokens.append(int(model(ids, use_cache=True, **{compat.CACHE_ARGUMENT: cache}).logits[0, -1].argmax()))
    return tokens


def ask(model: PreTrainedModel, cache: kvfoundry.KVCache) -> Tensor:
    """Logits of the question's last token; the cache goes on."""
    return model(QUESTION[None], use_cache=True, **{compat.CACHE_ARGUMENT: cache}).logits[0, -1]


@pytest.fixture(scope="module")
def chunks() -> Callable[[PreTrainedModel], list[ChunkKV]]:
    made: dict[int, list[ChunkKV]] = {}
    return lambda model: made.setdefault(id(model), read_all(model, passages(LENGTHS)))


@pytest.mark.filterwarnings("ignore::kvfoundry.coding.LossyCodecWarning")
@pytest.mark.parametrize("name", [name for name in METHODS if name not in APART])
@torch.no_grad()
def test_any_method_goes_on_from_a_blended_cache(
    name: str, tiny_model: Models, chunks: Callable[[PreTrainedModel], list[ChunkKV]]
) -> None:
    """It acts when the question has been read, keeps its budget, and decodes."""
    model, method = tiny_model("llama"), METHODS[name]
    cache = blend_chunks(model, [chunks(model)], [QUESTION], blend="blend(ratio=0.3)", method=method).cache
    assert cache.seen_tokens == sum(LENGTHS)
    assert [layer.lengths.tolist() for layer in cache.attention_layers] == [[[45, 45]]] * 2
    first = ask(model, cache)
    if method.evicts and method.schedule.prefill != "never" and keeps_exactly(method):
        for layer in cache.attention_layers:
            assert not layer.evicts or layer.lengths.eq(12).all(), name
    assert torch.isfinite(first).all()
    assert len(steps(model, cache, first)) == 7
    assert cache.seen_tokens == sum(LENGTHS) + 6 + 6


@pytest.mark.parametrize("spec", ["snapkv(budget=12, window=10)", "tova(budget=12)", "keydiff(budget=12)",
                                  "streamingllm(budget=12)", "nacl(budget=12, proxies=8)",
                                  "h2o(budget=12, window=4)+schedule(prefill='end')"])  # fmt: skip
@torch.no_grad()
def test_at_ratio_one_a_method_keeps_what_it_keeps_of_a_full_prefill(
    spec: str, tiny_model: Models, chunks: Callable[[PreTrainedModel], list[ChunkKV]]
) -> None:
    """Its window may reach back in front of the question, and its sums count every query."""
    model = tiny_model("llama")
    blended = blend_chunks(model, [chunks(model)], [QUESTION], blend="blend(ratio=1.0)", method=spec)
    ask(model, blended.cache)
    full = kvfoundry.KVCache(model, spec)
    model(torch.cat([*passages(LENGTHS), QUESTION])[None], use_cache=True, **{compat.CACHE_ARGUMENT: full})
    for ours, whole in zip(blended.cache.attention_layers, full.attention_layers, strict=True):
        assert torch.equal(ours.positions, whole.positions)


@torch.no_grad()
def test_one_blend_serves_many_questions(
    tiny_model: Models, chunks: Callable[[PreTrainedModel], list[ChunkKV]]
) -> None:
    model = tiny_model("gemma3")
    blended = blend_chunks(model, [chunks(model)], blend="blend(ratio=0.3)")
    before = copy.deepcopy([layer.keys for layer in blended.cache.attention_layers])
    again = blend_chunks(model, [chunks(model)], blend="blend(ratio=0.3)")
    answers = []
    for cache in (blended.cache.fork(), blended.cache.fork(), again.cache):
        answers.append(steps(model, cache, ask(model, cache)))
    assert answers[0] == answers[1] == answers[2]
    for layer, keys in zip(blended.cache.attention_layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


@torch.no_grad()
def test_tokens_can_be_taken_back(tiny_model: Models, chunks: Callable[[PreTrainedModel], list[ChunkKV]]) -> None:
    model = tiny_model("llama")
    blended = blend_chunks(model, [chunks(model)], [QUESTION])
    wanted = asked(model, blended)[0, -1]
    ask(model, blended.cache)
    blended.cache.crop(-len(QUESTION))
    torch.testing.assert_close(ask(model, blended.cache), wanted)


@torch.no_grad()
def test_chunks_are_never_written(tiny_model: Models) -> None:
    model = tiny_model("llama")
    own = read_all(model, passages(LENGTHS))
    before = copy.deepcopy([chunk.tensors() for chunk in own])
    for spec in ("blend(select=none)", "blend(ratio=0.5)", "blend(ratio=1.0)"):
        cache = blend_chunks(model, [own], [QUESTION], blend=spec).cache
        steps(model, cache, ask(model, cache))
    for chunk, tensors in zip(own, before, strict=True):
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in chunk.tensors().items())


def test_nothing_is_left_on_the_model(own_model: Models) -> None:
    model = own_model("llama")
    own = read_all(model, passages(LENGTHS))

    def state() -> list[object]:
        return [(name, sorted(vars(module)), module._forward_hooks, module._forward_pre_hooks)
                for name, module in model.named_modules()]  # fmt: skip

    before = copy.deepcopy(state())
    blend_chunks(model, [own], [QUESTION], blend="blend(ratio=0.3, select=query_aware)")
    assert state() == before


@pytest.mark.parametrize("name", sorted(name for name in APART if METHODS[name].reconstructs is None
                                        and METHODS[name].pairs is None))  # fmt: skip
def test_a_method_that_needs_every_query_is_refused(name: str, tiny_model: Models) -> None:
    model = tiny_model("llama")
    with pytest.raises(SpecError, match="a blended prompt has only some"):
        blend_chunks(model, [read_all(model, passages(LENGTHS))], [QUESTION], method=METHODS[name])
