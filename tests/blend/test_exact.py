"""Blending against stock transformers: full prefill at ratio 1, the moved concatenation at ratio 0, and in between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, WINDOW, random_ids
from torch import Tensor
from transformers import PreTrainedModel

from kvfoundry.blend import Blend, blend_chunks
from kvfoundry.blend.placing import Feed
from kvfoundry.blend.rows import WorkingRows
from kvfoundry.chunks.passage import read_passage

from .support import asked, blended_logits, full_logits, passages, read_all, selective_reference

Models = Callable[..., PreTrainedModel]
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-4}
SELECTORS = ("deviation", "query_aware", "first_k_per_chunk", "random")
# Short enough that windows reach everything: the reference has one mask for all layers.
SHORT, QUESTION = (4, 5, 4), 3


def question() -> Tensor:
    return random_ids(QUESTION, seed=99)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(9, 30, 11), (1, 1, 40)], ids=str)
def test_ratio_one_is_full_prefill(
    family: str, lengths: tuple[int, ...], tiny_model: Models, reference_model: Models
) -> None:
    """Also where passages are longer than the window, and where they have one token."""
    model, parts = tiny_model(family), passages(lengths)
    wanted = full_logits(reference_model(family), torch.cat([*parts, question()]), QUESTION)
    for select in SELECTORS if family == "llama" else SELECTORS[:1]:
        found = blended_logits(model, read_all(model, parts), question(), f"blend(ratio=1.0, select={select})")
        torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_ratio_is_the_moved_concatenation(family: str, tiny_model: Models, reference_model: Models) -> None:
    model, parts = tiny_model(family), passages(SHORT)
    wanted = selective_reference(reference_model(family), parts, question(), [])
    for spec in ("blend(select=none)", "blend(ratio=0)"):
        torch.testing.assert_close(blended_logits(model, read_all(model, parts), question(), spec), wanted, **CLOSE)


@pytest.mark.parametrize(
    ("family", "select"),
    [*((family, "deviation") for family in FAMILIES), *((f, s) for f in ("llama", "gemma2") for s in SELECTORS[1:])],
)
def test_chosen_tokens_are_computed_over_reused_rows(
    family: str, select: str, tiny_model: Models, reference_model: Models
) -> None:
    model, parts = tiny_model(family), passages(SHORT)
    blended = blend_chunks(model, [read_all(model, parts)], [question()], blend=f"blend(ratio=0.4, select={select})")
    chosen = blended.recomputed[0].tolist()
    assert len(chosen) == 5
    wanted = selective_reference(reference_model(family), parts, question(), chosen)
    torch.testing.assert_close(asked(model, blended)[0], wanted, **CLOSE)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "llama"])
def test_exact_rows_and_fresh_ones_make_a_full_prefill(
    family: str, tiny_model: Models, reference_model: Models
) -> None:
    """The first passage is in its place; with all others computed again nothing is approximate, windows included."""
    model, parts = tiny_model(family), passages((WINDOW + 7, 20, 9))
    chunks = read_all(model, parts)
    later = 29 / sum(map(len, parts)) + 1e-9
    blended = blend_chunks(model, [chunks], [question()], blend=f"blend(ratio={later}, select=first_k_per_chunk)")
    assert blended.exact == [WINDOW + 7]
    assert blended.recomputed[0].tolist() == list(range(WINDOW + 7, WINDOW + 36))
    wanted = full_logits(reference_model(family), torch.cat([*parts, question()]), QUESTION)
    torch.testing.assert_close(asked(model, blended)[0], wanted, **CLOSE)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
@pytest.mark.parametrize("spec", ["blend(ratio=0.3)", "blend(ratio=0.3, select=query_aware)", "blend(ratio=1.0)"])
def test_a_row_of_a_batch_is_what_it_is_alone(family: str, spec: str, tiny_model: Models) -> None:
    model = tiny_model(family)
    prompts = [passages((9, 30, 11)), passages((4,), seed=3), passages((3, 19), seed=5)]
    questions = [random_ids(length, seed=length) for length in (5, 8, 1)]
    chunks = [read_all(model, parts) for parts in prompts]
    together = blend_chunks(model, chunks, questions, blend=spec)
    logits = asked(model, together)
    for row, (own, tail) in enumerate(zip(chunks, questions, strict=True)):
        alone = blend_chunks(model, [own], [tail], blend=spec)
        assert torch.equal(alone.recomputed[0], together.recomputed[row])
        torch.testing.assert_close(logits[row, -len(tail) :], asked(model, alone)[0], **CLOSE)


def test_a_passage_behind_a_head_is_exact_in_its_place(tiny_model: Models, reference_model: Models) -> None:
    model, (head, first, second) = tiny_model("llama"), passages((5, 8, 12))
    chunks = [read_passage(model, head), *read_all(model, [first, second], context_ids=head)]
    blended = blend_chunks(model, [chunks[:2]], [question()], blend="blend(select=none)")
    assert blended.exact == [13]
    wanted = full_logits(reference_model("llama"), torch.cat([head, first, question()]), QUESTION)
    torch.testing.assert_close(asked(model, blended)[0], wanted, **CLOSE)
    assert blend_chunks(model, [chunks], [question()]).exact == [13]
    assert blend_chunks(model, [[chunks[0], chunks[2], chunks[1]]], [question()]).exact == [17]


def test_gradual_filtering_ends_at_the_ratio(tiny_model: Models, reference_model: Models) -> None:
    model, parts = tiny_model("llama", num_hidden_layers=4), passages((9, 12, 11))
    chunks = read_all(model, parts)
    spec = "blend(ratio=0.25, check=(1, 2, 3), widen=2.0)"
    blended = blend_chunks(model, [chunks], [question()], blend=spec)
    assert len(blended.recomputed[0]) == 8
    first = blend_chunks(model, [chunks], [question()], blend="blend(ratio=0.5)").recomputed[0]
    assert set(blended.recomputed[0].tolist()) < set(first.tolist())
    whole = blended_logits(model, chunks, question(), Blend.parse(spec.replace("0.25", "1.0")))
    wanted = full_logits(reference_model("llama", num_hidden_layers=4), torch.cat([*parts, question()]), QUESTION)
    torch.testing.assert_close(whole, wanted, **CLOSE)


def test_rows_are_made_ahead_by_one_thread_in_the_order_of_their_reading(
    tiny_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check layer is compared first; layers that are computed whole are never made."""
    model, parts = tiny_model("llama", num_hidden_layers=4), passages(SHORT)
    chunks, made = read_all(model, parts), []
    assemble = Feed._assembled

    def noted(self: Feed, layer: int) -> WorkingRows:
        made.append((layer, threading.current_thread().name.partition("_")[0]))
        return assemble(self, layer)

    monkeypatch.setattr(Feed, "_assembled", noted)
    blend_chunks(model, [chunks], [question()])  # the check of the model blends, too
    orders = {"blend(ratio=0.3, check=2)": [2, 3], "blend(ratio=0)": [0, 1, 2, 3], "blend(ratio=1.0, check=3)": [],
              "blend(ratio=0.3, select=random)": [0, 1, 2, 3], "blend(ratio=1.0, select=random)": []}  # fmt: skip
    for spec, order in orders.items():
        made.clear()
        blend_chunks(model, [chunks], [question()], blend=spec)
        assert made == [(layer, "kvfoundry-blend") for layer in order], spec
