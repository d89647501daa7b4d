"""A model over real devices against the same on one: cases of `splits`. Skipped without a CUDA device.

- two GPUs: `kvfoundry.load(..., device_map=...)` lays the layers on both; skipped where one is visible.
- GPU and CPU: one part computes on the GPU, the other on the CPU, so a split has two devices on any GPU machine.
- weights on the host: accelerate fetches them when the GPU computes; rows are on the GPU then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import splits
import torch
from accelerate import dispatch_model
from laws.support import METHODS
from splits import BLENDS, CASES, CHUNK_SPECS, LAYERS, Split, same
from tiny_models import FAMILIES, build

import kvfoundry

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FIRST, SECOND, HOST = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")
KINDS = ["two GPUs", "GPU and CPU", "weights on the host"]
# Codes and choices fall on one side or the other of a border by the last bit, and a CPU rounds as no GPU does.
NUMBERS = {"two GPUs": 1e-4, "GPU and CPU": 5e-3, "weights on the host": 1e-4}

Built = Callable[..., Split]


def places_of(family: str, layers: list[Any], *, tied: bool) -> dict[str, Any]:
    """A device map of a tiny model: its end with the last layer, but beside the embedding where both are one weight."""
    names = [name for name, _ in build(family).model.named_children() if name not in ("layers", "norm")]
    return {
        **{f"model.{name}": layers[0] for name in names},
        **{f"model.layers.{number}": place for number, place in enumerate(layers)},
        "model.norm": layers[-1],
        "lm_head": layers[0 if tied else -1],
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """`models(kind, family, layers)`: each built once. kind None: all of it on the first GPU."""
    known: dict[Any, Split] = {}

    def made(kind: str | None, family: str, layers: int) -> Split:
        first, last = [FIRST] * (layers - 1), {"two GPUs": SECOND, "GPU and CPU": HOST}.get(kind or "", FIRST)
        sizes = {} if layers == 2 else {"num_hidden_layers": layers}
        model = build(family, **sizes)
        tied = model.config.tie_word_embeddings
        if kind is None:
            return Split(model.to(FIRST), (*first, last))
        if kind == "GPU and CPU":
            places = places_of(family, [0] * (layers - 1) + ["cpu"], tied=tied)
            return Split(dispatch_model(model, places, main_device="cpu", force_hooks=True), (*first, last))
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        wait = "cpu" if kind == "weights on the host" else 1
        places = places_of(family, [0] * (layers - 1) + [wait], tied=tied)
        loaded, _ = kvfoundry.load(
            folder, device_map=places, dtype="float32", attn_implementation="eager", tokenizer=False
        )
        loaded.generation_config.eos_token_id = None
        return Split(loaded, (*first, last))

    def get(kind: str | None, family: str = "llama", layers: int = LAYERS) -> Split:
        if kind == "two GPUs" and torch.cuda.device_count() < 2:
            pytest.skip("needs two CUDA devices")
        if (kind, family, layers) not in known:
            known[kind, family, layers] = made(kind, family, layers)
        return known[kind, family, layers]

    return get


def alike(models: Built, kind: str, case: Callable[[Split], list[Any]]) -> None:
    same(case(models(kind)), case(models(None)), NUMBERS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_b13_every_method_says_what_it_says_on_one_device(name: str, kind: str, models: Built) -> None:
    """Greedy text, rows and bytes of two prompts in pieces, and logits of a left-padded batch."""
    spec, method = splits.spec_of(name), METHODS[name]
    if kind == "GPU and CPU" and (method.lossy or method.dispose is not None):
        found = splits.logits(models(kind), spec)[0]
        assert bool(torch.isfinite(found).all())  # each layer's tensors were checked to be where it is
        return
    alike(models, kind, partial(splits.texts, spec=spec))
    if method.reconstructs is None:
        alike(models, kind, partial(splits.logits, spec=spec))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [*CASES, *BLENDS])
def test_b13_offload_forks_and_blends_are_those_of_one_device(case: str, kind: str, models: Built) -> None:
    run = {**CASES, **BLENDS}[case]
    if kind == "GPU and CPU" and any(word in case for word in ("kivi", "minicache", "coded", "together")):
        run(models(kind))  # places are checked; codes of a CPU are not those of a GPU
        return
    alike(models, kind, run)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", CHUNK_SPECS)
def test_b13_a_chunk_goes_on_from_any_device(spec: str, kind: str, models: Built) -> None:
    anywhere = sorted({HOST, *models(kind).places}, key=str)
    if kind == "GPU and CPU":
        splits.chunked(models(kind), spec, anywhere)
        return
    same(
        splits.chunked(models(kind), spec, anywhere),
        splits.chunked(models(None), spec, [HOST, *[FIRST] * (len(anywhere) - 1)]),
        NUMBERS[kind],
    )


@pytest.mark.parametrize("kind", KINDS)
def test_b13_chunks_of_a_store_come_to_the_devices_of_their_layers(kind: str, models: Built, tmp_path: Path) -> None:
    found = splits.stored(models(kind), tmp_path / "split")
    same(found, splits.stored(models(None), tmp_path / "one"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_b13_every_family(family: str, kind: str, models: Built) -> None:
    found, expected = (splits.logits(models(each, family, 2), "fullkv") for each in (kind, None))
    same(found, expected, NUMBERS[kind])


@pytest.mark.parametrize("method", ["fullkv", "h2o(budget=12, window=4)", "quest(budget=12, page=4)"])
def test_the_engine_serves_a_model_on_the_second_gpu(method: str) -> None:
    """All of the model there, and the first GPU the present one: kernels, graph and events belong to the second."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    prompts = [splits.words(length, length) for length in splits.LENGTHS]
    texts = []
    for device in (FIRST, SECOND):
        model = build("llama").to(device, torch.bfloat16)
        answers = kvfoundry.generate(
            model, splits.build_tokenizer(), prompts, method=method, max_new_tokens=12, engine=True, details=True
        )
        assert not [note for note in answers[0].notes if "plain loop" in note]
        texts.append([answer.token_ids for answer in answers])
    assert texts[0] == texts[1]


def test_the_engine_leaves_a_split_model_to_the_plain_loop(models: Built) -> None:
    split = models("GPU and CPU")
    answer = kvfoundry.generate(
        split.model, splits.build_tokenizer(), splits.words(9, 1), max_new_tokens=3, engine=True, details=True
    )
    assert "decoded by the plain loop: the model is spread over several devices." in answer.notes
