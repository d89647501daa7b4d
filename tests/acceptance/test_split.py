"""B13: a model over two devices. Every method, offload and blend gives what it gives on one, each layer where it is.

The devices are pretended (see `pretended`): that no tensors of two devices meet, and that all numbers are the same, can
then be seen on any machine. `gpu/test_split_cuda.py` does the same on real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import splits
import torch
from accelerate import dispatch_model
from accelerate.utils import OffloadedWeightsLoader
from laws.support import METHODS
from pretended import CPU, FIRST, SECOND, MixedDevicesError, PretendedDevices, split_model
from splits import BLENDS, CASES, CHUNK_SPECS, LAYERS, Split, same
from tiny_models import FAMILIES, build

import kvfoundry
from kvfoundry.blend import placing
from kvfoundry.engine.serving import refusal

Case = Callable[[Split], list[Any]]
# transformers counts the tokens of each expert by what the kind of device can do, and knows no pretended one.
ROUTED = {"mixtral", "gpt_oss"}


@pytest.fixture(autouse=True)
def _blend_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that makes blended rows pretends too: modes are a matter of one thread."""
    monkeypatch.setattr(placing, "ThreadPoolExecutor", partial(ThreadPoolExecutor, initializer=MODE.__enter__))


MODE = PretendedDevices()
ONE = (FIRST,) * LAYERS
THROUGH_A_PAIR = (FIRST, FIRST, FIRST, SECOND)
BACK_AND_FORTH = (FIRST, SECOND, FIRST, SECOND)


@cache
def on(places: tuple[torch.device, ...], family: str = "llama") -> Split:
    model = build(family, num_hidden_layers=len(places))
    if set(places) == {CPU}:
        return Split(model, places)
    with MODE:
        return Split(split_model(model, places), places)


@cache
def of_one(blend: str) -> list[Any]:
    """A blend on one pretended device: kernels for blending are not the same on every kind of device."""
    with MODE:
        return BLENDS[blend](on(ONE))


def alike(case: Case, places: tuple[torch.device, ...] = THROUGH_A_PAIR, family: str = "llama") -> None:
    """The case on a split model under the mode, and on a plain one on the CPU without it."""
    with MODE:
        found = case(on(places, family))
    same(found, case(on((CPU,) * len(places), family)))


@pytest.mark.parametrize("name", METHODS)
def test_b13_every_method_says_what_it_says_on_one_device(name: str) -> None:
    """Greedy text, rows and bytes of two prompts in pieces, and logits to the last bit, of a left-padded batch."""
    spec = splits.spec_of(name)
    alike(lambda split: splits.texts(split, spec))
    if METHODS[name].reconstructs is None:
        alike(lambda split: splits.logits(split, spec))


@pytest.mark.parametrize("case", CASES)
def test_b13_offload_and_forks_are_those_of_one_device(case: str) -> None:
    alike(CASES[case])


@pytest.mark.parametrize("places", [THROUGH_A_PAIR, BACK_AND_FORTH], ids=["one border", "back and forth"])
@pytest.mark.parametrize("case", BLENDS)
def test_b13_a_blend_is_that_of_one_device(case: str, places: tuple[torch.device, ...]) -> None:
    with MODE:
        found = BLENDS[case](on(places))
    same(found, of_one(case))


@pytest.mark.parametrize("spec", CHUNK_SPECS)
def test_b13_a_chunk_goes_on_from_any_device(spec: str) -> None:
    with MODE:
        found, expected = (splits.chunked(on(places), spec, [CPU, FIRST, SECOND]) for places in (THROUGH_A_PAIR, ONE))
    same(found, expected)


def test_b13_chunks_of_a_store_come_to_the_devices_of_their_layers(tmp_path: Path) -> None:
    with MODE:
        found, expected = (
            splits.stored(on(places), tmp_path / name) for places, name in ((THROUGH_A_PAIR, "split"), (ONE, "one"))
        )
    same(found, expected)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ROUTED])
def test_b13_every_family(family: str) -> None:
    """Window layers keep their rule, soft-caps and norms are those of the layer."""
    for spec in ("fullkv", "expected_attention(budget=12)+park()") if family != "mistral" else ("fullkv",):
        alike(partial(splits.logits, spec=spec), (FIRST, SECOND), family)


@pytest.mark.parametrize("embedding", [FIRST, "cpu"], ids=str)
def test_b13_weights_that_wait_on_the_host(embedding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers whose weights are fetched when they compute have their rows where they compute, and none is copied."""

    def copied(self: Any, memo: Any) -> Any:
        raise AssertionError("every weight on the host would be copied")

    monkeypatch.setattr(OffloadedWeightsLoader, "__deepcopy__", copied, raising=False)
    model = build("llama", num_hidden_layers=LAYERS)
    places = {"model.embed_tokens": embedding, "model.rotary_emb": "cpu", "model.layers.0": "cpu",
              "model.layers.1": SECOND, "model.layers.2": "cpu", "model.layers.3": SECOND, "model.norm": FIRST,
              "lm_head": FIRST}  # fmt: skip
    with MODE:
        dispatch_model(model, places, main_device=FIRST, force_hooks=True)
        assert {str(parameter.device) for parameter in model.parameters()} >= {"meta", str(SECOND)}
        found = Split(model, BACK_AND_FORTH)
        for spec in ("fullkv", "leverage(budget=12)", "criticalkv(budget=12, window=4)", splits.MERGING):
            same(splits.logits(found, spec), splits.logits(on(ONE), spec))
        for case in ("deviation", "query_aware, checked"):
            same(BLENDS[case](found), of_one(case))
        same(splits.chunked(found, splits.MERGING, [CPU]), splits.chunked(on(ONE), splits.MERGING, [CPU]))


def test_the_engine_leaves_a_split_model_to_the_plain_loop() -> None:
    split = on(THROUGH_A_PAIR)
    with MODE:
        assert refusal(split.model, kvfoundry.KVCache(split.model)) == "the model is spread over several devices"
        answer = kvfoundry.generate(
            split.model, splits.build_tokenizer(), splits.words(9, 1), max_new_tokens=3, engine=True, details=True
        )
    assert any(note.startswith("decoded by the plain loop: ") for note in answer.notes)


def test_pretended_devices_refuse_what_real_ones_refuse() -> None:
    """The guard itself: what may meet, what may not, and that results are where their tensors are."""
    with MODE:
        first, second = torch.ones(3, device=FIRST), torch.arange(3, device=SECOND)
        host = torch.arange(3)
        for meeting in (
            lambda: first + second, lambda: first * host, lambda: torch.cat([first, second]), lambda: first[second],
            lambda: host[first.long()], lambda: torch.where(host > 1, first, first), lambda: first + second.sum(),
            lambda: first.index_copy_(0, host, first), lambda: first.__setitem__(second, 0.0),
            lambda: torch.nn.functional.embedding(host, first[:, None]), lambda: torch.equal(first, host.float()),
        ):  # fmt: skip
            with pytest.raises(MixedDevicesError):
                meeting()
        for result in (
            first + 1, first * host.sum(), first[host], first.view(3, 1), first.new_zeros(2), first.clone(),
            torch.zeros_like(first), second.to(first), first[0], first.expand_as(second), torch.relu(first),
        ):  # fmt: skip
            assert result.device == FIRST
        assert first.cpu().device == first.to("cpu").device == CPU and first.to(SECOND, torch.long).device == SECOND
        assert first.to(FIRST) is first and first.to(SECOND) is not first
        target = torch.zeros(3, device=SECOND)
        target.copy_(first)
        target[:2] = first[:2]
        assert target.device == SECOND and target.tolist() == [1.0, 1.0, 1.0]
