"""What is done with a model that is split over devices, to be compared with the same on one device.

Every case takes a `Split` and returns what came of it, on the CPU; on the way it asserts that each layer holds its
rows where it computes. `acceptance/test_split.py` runs the cases on pretended devices, `gpu/test_split_cuda.py` on real
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blend.support import asked, passages, read_all
from laws.support import METHODS, forward_pieces, small_spec
from tiny_models import build_tokenizer, left_padded, random_ids
from torch import Tensor
from transformers import PreTrainedModel

import kvfoundry
from kvfoundry import compat
from kvfoundry.blend import blend_chunks
from kvfoundry.chunks.passage import read_passage
from kvfoundry.together import generate_together

LAYERS = 4
# Where neighbouring layers are merged, a split behind the third layer runs through a pair.
MERGING = "minicache(start=0.0, retention=0.3)"
LENGTHS = [40, 27]


@dataclass(frozen=True)
class Split:
    """places: the device of every layer; home: where the model takes its tokens."""

    model: PreTrainedModel
    places: tuple[torch.device, ...]

    @property
    def home(self) -> torch.device:
        return self.places[0]

    def check(self, cache: kvfoundry.KVCache) -> None:
        """Each layer's rows, positions, statistics and codes are on its device, and what is parked on the host."""
        for layer, place in zip(cache.attention_layers, self.places, strict=True):
            assert {tensor.device for tensor in layer.tensors()} <= {place}
            assert {tensor.device for tensor in layer.parked_tensors()} <= {torch.device("cpu")}

    def fed(self, cache: kvfoundry.KVCache, ids: Tensor, pieces: list[int], mask: Tensor | None = None) -> Tensor:
        """Logits of ids in pieces, with the check after them."""
        found = forward_pieces(
            self.model, cache, ids.to(self.home), pieces, None if mask is None else mask.to(self.home)
        )
        self.check(cache)
        return found.cpu()


def words(count: int, seed: int) -> str:
    return " ".join(f"w{int(token)}" for token in random_ids(count, seed=seed))


def spec_of(name: str) -> str:
    """A small spec of a registered method for the models of these cases."""
    return MERGING if METHODS[name].pairs is not None else small_spec(name, layers=LAYERS)


def texts(split: Split, spec: str) -> list[Any]:
    """Answers to two prompts of different lengths, read in pieces."""
    prompts = [words(length, length) for length in LENGTHS]
    found = kvfoundry.generate(
        split.model, build_tokenizer(), prompts, method=spec, max_new_tokens=6, prefill_chunk=16, details=True
    )
    return [[each.token_ids, each.kept_rows, each.stored_bytes] for each in found]


def logits(split: Split, spec: str) -> list[Any]:
    """Logits of a left-padded batch in pieces, the prompt first."""
    ids, mask = left_padded(LENGTHS)
    return [split.fed(kvfoundry.KVCache(split.model, spec), ids, [36, 1, 2, 1], mask)]


def turns(split: Split, spec: str) -> list[Any]:
    """Forks of a document whose batch rows change places or are repeated, as beams do."""
    ids, mask = left_padded(LENGTHS)
    document = kvfoundry.KVCache(split.model, spec)
    split.fed(document, ids, [40], mask)
    found = []
    for rows, act in (
        ([1, 0], lambda cache: cache.reorder_cache(torch.tensor([1, 0], device=split.home))),
        ([0, 0, 1, 1], lambda cache: cache.batch_repeat_interleave(2)),
        ([0, 1], lambda cache: None),
    ):
        fork = document.fork()
        act(fork)
        split.check(fork)
        more = random_ids(4, 5, seed=3)[: len(rows)]
        whole = torch.cat([mask[rows], torch.ones(len(rows), 5, dtype=torch.long)], dim=1)
        found.append(split.fed(fork, more, [1, 3, 1], whole))
    return found


def beams(split: Split, spec: str) -> list[Any]:
    """Beam search over the batch."""
    ids, mask = (tensor.to(split.home) for tensor in left_padded(LENGTHS))
    output = split.model.generate(
        ids, attention_mask=mask, num_beams=3, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0,
        **{compat.CACHE_ARGUMENT: kvfoundry.KVCache(split.model, spec)},
    )  # fmt: skip
    return [output.cpu()]


def cropped(split: Split) -> list[Any]:
    """Tokens taken back, by hand and by prompt lookup."""
    cache, ids = kvfoundry.KVCache(split.model), random_ids(1, 30)
    split.fed(cache, ids, [30])
    cache.crop(20)
    found = split.fed(cache, ids[:, 20:], [10])
    text = torch.cat([ids, ids], dim=1).to(split.home)
    looked_up = split.model.generate(
        text, attention_mask=torch.ones_like(text), prompt_lookup_num_tokens=3, max_new_tokens=6, do_sample=False,
        eos_token_id=None, pad_token_id=0, **{compat.CACHE_ARGUMENT: kvfoundry.KVCache(split.model)},
    )  # fmt: skip
    return [found, looked_up.cpu()]


def recalled(split: Split, spec: str, *, act_again: bool) -> list[Any]:
    """Rows that were dropped wait on the host and come back to a fork."""
    cache, ids = kvfoundry.KVCache(split.model, spec), random_ids(1, 30)
    found = [split.fed(cache, ids, [30]), split.fed(cache, ids[:, :4], [1, 3])]
    assert cache.parked_nbytes
    fork = cache.fork()
    fork.recall(act_again=act_again)
    return [*found, split.fed(fork, ids[:, :9], [5, 1, 3]), float(fork.kept_rows), fork.parked_nbytes]


def blended(split: Split, spec: str, method: str | None = None, chunk_method: str | None = None) -> list[Any]:
    """Two prompts of chunks, one of them shorter, and the logits of their questions."""
    chunks = read_all(split.model, passages((10, 7, 12)), method=chunk_method)
    others = [*read_all(split.model, passages((9,), seed=3), method=chunk_method), chunks[0]]
    for chunk in (*chunks, *others):
        assert [layer.device for layer in chunk.layers] == list(split.places)
    questions = [random_ids(5, seed=9), random_ids(3, seed=10)]
    found = blend_chunks(split.model, [chunks, others], questions, blend=spec, method=method)
    split.check(found.cache)
    return [[tokens.tolist() for tokens in found.recomputed], asked(split.model, found).cpu()]


def stored(split: Split, folder: Path) -> list[Any]:
    """Documents computed and put, then found in a store's tiers: memory, and a new store's disk."""
    found = []
    for hits in (0, 2, 2):
        with kvfoundry.ChunkStore(f"host:1MiB,disk:{folder}:10MiB") as store:
            answer = kvfoundry.generate(
                split.model, build_tokenizer(), words(5, 9), documents=[words(20, 1), words(15, 4)], store=store,
                blend="blend(ratio=0.3)", method="snapkv(budget=12, window=4)", max_new_tokens=6, details=True,
            )  # fmt: skip
        assert f"{hits} of 2 documents were in the store." in answer.notes
        found.append([answer.token_ids, answer.recomputed_tokens])
    assert found[0] == found[1] == found[2]
    return found


def chunked(split: Split, spec: str, anywhere: list[torch.device]) -> list[Any]:
    """A chunk goes on as a cache from wherever its rows are: as they were taken, and all on one device."""
    chunk = read_passage(split.model, random_ids(20), spec)
    found: list[Any] = [chunk.plain(split.model).layers[-1].keys.cpu()]
    for held in (chunk, *(chunk.to(device) for device in anywhere)):
        cache = held.to_cache(split.model)
        split.check(cache)
        found.append(split.fed(cache, random_ids(1, 6, seed=5), [1, 4, 1]))
    return found


def shared_prompt(split: Split) -> list[Any]:
    """One prompt read once by many methods, and answers decoded in common batches."""
    specs = ["fullkv", "snapkv(budget=12, window=4)", "snapkv(budget=8, window=4)", "h2o(budget=12, window=4)",
             "kvzip(budget=12)", "kivi(group=4, residual=8)", MERGING]  # fmt: skip
    answers = generate_together(split.model, build_tokenizer(), [words(40, 1), words(27, 3)], specs, max_new_tokens=6)
    return [[[each.token_ids, each.kept_rows] for each in arm] for arm in answers]


BLENDS: dict[str, Callable[[Split], list[Any]]] = {
    "none": lambda split: blended(split, "blend(ratio=0)"),
    "deviation": lambda split: blended(split, "blend(ratio=0.3)"),
    "everything": lambda split: blended(split, "blend(ratio=1.0)"),
    "filtered, all updated": lambda split: blended(split, "blend(ratio=0.4, check=(1, 3), update=all)"),
    "query_aware": lambda split: blended(split, "blend(ratio=0.3, select=query_aware)"),
    "query_aware, checked": lambda split: blended(split, "blend(ratio=0.3, select=query_aware, check=2)"),
    "corner": lambda split: blended(split, "blend(ratio=0.3, select=random, mask=corner)"),
    "under snapkv": lambda split: blended(split, "blend(ratio=0.3)", "snapkv(budget=12, window=4)"),
    "under kivi": lambda split: blended(split, "blend(ratio=0.3)", "kivi(group=4, residual=8)"),
    "evicted chunks": lambda split: blended(split, "blend(ratio=0.3)", None, "keydiff(budget=5)"),
    "coded chunks": lambda split: blended(split, "blend(ratio=0.3)", None, "int4(group=4, residual=4)"),
}

CASES: dict[str, Callable[[Split], list[Any]]] = {
    **{f"turns: {spec}": lambda split, spec=spec: turns(split, spec) for spec in (
        "fullkv", "snapkv(budget=12, window=4)", "h2o(budget=12, window=4)", "kivi(group=4, residual=8)", MERGING,
        "quest(budget=12, page=4)", "streamingllm(budget=12, sinks=2)", "adakv(budget=12, window=4)",
    )},
    **{f"beams: {spec}": lambda split, spec=spec: beams(split, spec) for spec in (
        "h2o(budget=12, window=4)", MERGING,
    )},
    **{f"park: {spec}, {again}": lambda split, spec=spec, again=again: recalled(split, spec, act_again=again)
       for again in (False, True) for spec in (
        "snapkv(budget=12, window=4)+park()", "h2o(budget=12, window=4)+park()", "adakv(budget=12, window=4)+park()",
    )},
    "crop": cropped,
    "together": shared_prompt,
}  # fmt: skip
CHUNK_SPECS = [
    "fullkv",
    "snapkv(budget=8, window=4)",
    "kivi(group=4, residual=8)",
    "think(recent=4, window=4)",
    MERGING,
]


def same(found: Any, expected: Any, atol: float = 0.0) -> None:
    """Assert that two results of a case are alike, their tensors up to `atol`."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=atol)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other, atol)
    else:
        assert found == expected
