"""Passages that come and go while a model reads: the same as attention over just what is there, from then on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from kvfoundry import compat
from kvfoundry.blend import blend_chunks
from kvfoundry.errors import CacheStateError, SpecError
from kvfoundry.method import Method
from kvfoundry.rag.making import Maker
from kvfoundry.rag.reader import PromptChunks, Reader

from .tiny import laid, maker_of, reference

FAMILIES = ("llama", "qwen3", "gemma2", "gpt_oss")


def reader_of(maker: Maker, prompt: object, first: list[int]) -> tuple[PromptChunks, Reader]:
    chunks = PromptChunks(maker, prompt)  # type: ignore[arg-type]
    return chunks, Reader(chunks, {each: chunks.placed(each) for each in first})


@torch.inference_mode()
@pytest.mark.parametrize("behind", ["head", "start", "sample"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_resident_is_the_blend_of_all(family: str, behind: str, own_model: Callable[..., PreTrainedModel]) -> None:
    model, prompt = own_model(family), laid(behind=behind)
    with maker_of(model) as maker:
        chunks, reader = reader_of(maker, prompt, [0, 1, 2, 3])
        found = reader.read(prompt.question)
        parts = [maker.get(chunks.head_key), *(chunks.chunk(each) for each in range(4))]
        blended = blend_chunks(model, [parts], [list(prompt.question)], blend="blend(ratio=0, select=none)")
        width = blended.context_ids.shape[1] + len(prompt.question)
        mask, cache = torch.ones(1, width, dtype=torch.long), {compat.CACHE_ARGUMENT: blended.cache}
        wanted = model(blended.question_ids, attention_mask=mask, use_cache=True, **cache).logits[0]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    if behind == "sample":  # the rows of the very prompt: nothing is lost at all
        whole = [*prompt.head, *(token for each in prompt.candidates for token in each.token_ids), *prompt.question]
        full = own_model(family)(torch.tensor([whole])).logits[0, -len(prompt.question) :]
        torch.testing.assert_close(found, full, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_one_that_comes_is_seen_from_then_on(
    family: str, own_model: Callable[..., PreTrainedModel], reference_model: Callable[..., PreTrainedModel]
) -> None:
    prompt = laid()
    sets = [[2, 3], [1, 2, 3], [1, 3], [0, 1, 2, 3], [0, 1, 2, 3], [], [2]]
    pieces = [prompt.question[:6], prompt.question[6:], (9,), (17, 23), (4,), (30,), (31,)]
    with maker_of(own_model(family)) as maker:
        chunks, reader = reader_of(maker, prompt, sets[0])
        found = []
        for ids, wanted in zip(pieces, sets, strict=True):
            here = reader.residents.here
            coming = {each: chunks.placed(each) for each in set(wanted) - here}
            reader.residents.exchange(here - set(wanted), coming)
            assert reader.residents.here == set(wanted)
            found.append(reader.read(ids))
            positions = reader.cache.layers[0].positions[0, 0]
            assert bool((positions.diff() > 0).all()), "rows are in the order of their positions"
        assert reader.seen == prompt.tokens + 6
    calls = list(zip(pieces, sets, strict=True))
    for own, stock in zip(found, reference(reference_model(family), prompt, calls), strict=True):
        torch.testing.assert_close(own, stock, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_layers_with_a_window_read_what_their_window_reaches(
    family: str, own_model: Callable[..., PreTrainedModel], reference_model: Callable[..., PreTrainedModel]
) -> None:
    prompt = laid((30, 40, 60, 8), seed=3)  # the window of 16 and its reserve leave the first ones behind
    sets = [[0, 3], [0, 2, 3], [0, 1, 2, 3]]
    pieces = [prompt.question, (9,), (17,)]
    with maker_of(own_model(family)) as maker:
        chunks, reader = reader_of(maker, prompt, sets[0])
        found = []
        for ids, wanted in zip(pieces, sets, strict=True):
            here = reader.residents.here
            reader.residents.exchange([], {each: chunks.placed(each) for each in set(wanted) - here})
            found.append(reader.read(ids))
    if family == "mistral":
        calls = list(zip(pieces, sets, strict=True))
        for own, stock in zip(found, reference(reference_model(family), prompt, calls, window=16), strict=True):
            torch.testing.assert_close(own, stock, atol=1e-4, rtol=1e-4)
        return
    with maker_of(own_model(family)) as maker:  # hybrid: all there from the beginning, for what comes afterwards
        _, whole = reader_of(maker, prompt, [0, 1, 2, 3])
        for number, layer in enumerate(reader.cache.attention_layers):
            if layer.rule.span is None:
                other = whole.cache.attention_layers[number]
                rows = layer.lengths[0, 0] - len(prompt.question) - 2
                torch.testing.assert_close(layer.keys[:, :, :rows], other.keys[:, :, :rows], atol=1e-5, rtol=1e-5)


def test_bytes_leave_with_the_rows(own_model: Callable[..., PreTrainedModel]) -> None:
    prompt = laid((200, 200, 8))
    with maker_of(own_model("llama")) as maker:
        chunks, reader = reader_of(maker, prompt, [0, 1, 2])
        full, held = reader.cache.nbytes, reader.residents.nbytes
        size = chunks.placed(0).nbytes
        reader.residents.exchange([0, 1], {})
        assert reader.residents.nbytes == held - 2 * size
        assert reader.cache.nbytes < full - 1.9 * size
        with pytest.raises(CacheStateError, match="are not here"):
            reader.residents.exchange([0], {})
        with pytest.raises(CacheStateError, match="are here already"):
            reader.residents.exchange([], {2: chunks.placed(2)})


def test_coded_chunks_serve_and_gapped_ones_are_refused(own_model: Callable[..., PreTrainedModel]) -> None:
    model, prompt = own_model("llama"), laid((90, 70, 80, 75))
    with maker_of(model) as plain, maker_of(model, method=Method.parse("int8")) as coded:
        _, whole = reader_of(plain, prompt, [0, 1, 2, 3])
        _, small = reader_of(coded, prompt, [0, 1, 2, 3])
        exact, near = whole.read(prompt.question), small.read(prompt.question)
        assert 0 < float((exact - near).abs().max()) < 0.2 * float(exact.abs().max())
    with (
        pytest.raises(SpecError, match="leaves gaps in a passage"),
        maker_of(model, method=Method.parse("l2norm(budget=4)")),
    ):
        pass
