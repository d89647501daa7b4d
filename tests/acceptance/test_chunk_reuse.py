"""B55 to B64: chunks of passages that are reused anywhere in a prompt, and blended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blend.support import asked, blended_logits, full_logits, passages, read_all, selective_reference
from tiny_models import FAMILIES, random_ids
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import kvfoundry
from kvfoundry.blend import blend_chunks, blended_cache, segment
from kvfoundry.blend.check import require_exact
from kvfoundry.chunks.passage import read_passage
from kvfoundry.errors import DataError, UnsupportedModelError

Models = Callable[..., PreTrainedModel]


def words(count: int, seed: int) -> str:
    """A text of so many tokens under the tiny tokenizer."""
    return " ".join(f"w{token}" for token in random_ids(count, seed=seed).tolist())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvfoundry.ChunkStore]:
    with kvfoundry.ChunkStore(f"device:cpu:64MiB,host:64MiB,disk:{tmp_path / 'chunks'}:64MiB") as opened:
        yield opened


class Asker:
    """Asks over documents: details of the answer."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, store: kvfoundry.ChunkStore | None):
        self.model, self.tokenizer, self.store = model, tokenizer, store

    def __call__(self, documents: list[str], question: str = "w5 w6 w7", **options: Any) -> Any:
        return kvfoundry.generate(
            self.model, self.tokenizer, question, documents=documents, store=self.store, max_new_tokens=6,
            details=True, **options,
        )  # fmt: skip


@pytest.mark.parametrize("spec", ["blend(ratio=0.2)", "blend(ratio=0.2, select=query_aware)"])
def test_b55_an_identical_request_is_answered_alike_from_every_tier(
    spec: str, tiny_model: Models, tokenizer: PreTrainedTokenizerFast, store: kvfoundry.ChunkStore
) -> None:
    model = tiny_model("llama")
    ask, documents = Asker(model, tokenizer, store), [words(30, 1), words(17, 2), words(22, 3)]
    answers = [ask(documents, blend=spec) for _ in range(3)]
    keys = [kvfoundry.Identity.of(model, tokenizer).key(own) for own in _ids(tokenizer, documents)]
    assert [answer.reused_tokens for answer in answers] == [0, 69, 69]
    device = store.tiers[0]
    for key in keys:  # now in host memory and on disk only
        assert device.drop(key.id) or not device.holds(key.id)
    answers.append(ask(documents, blend=spec))
    for key in keys:  # and now on disk only
        assert store.evict(key)
    before = store.stats()["tiers"]["disk"]["hits"]
    answers.append(ask(documents, blend=spec))
    assert store.stats()["tiers"]["disk"]["hits"] == before + 3
    assert [answer.reused_tokens for answer in answers[3:]] == [69, 69]
    assert len({answer.text for answer in answers}) == 1
    assert len({answer.recomputed_tokens for answer in answers}) == 1


def _ids(tokenizer: Any, documents: list[str]) -> list[tuple[int, ...]]:
    return list(segment(tokenizer, documents).passages)


def test_b56_the_ratio_decides_how_much_is_computed_and_how_near_it_is(
    tiny_model: Models, reference_model: Models
) -> None:
    model, parts, question = tiny_model("llama", num_hidden_layers=4), passages((20, 25, 15, 30)), random_ids(5, seed=9)
    reference = reference_model("llama", num_hidden_layers=4)
    chunks, whole = read_all(model, parts), read_passage(model, torch.cat(parts))
    errors, counts = [], []
    for ratio in (0.0, 0.1, 0.16, 0.5, 1.0):
        blended = blend_chunks(model, [chunks], [question], blend=f"blend(ratio={ratio})")
        counts.append(blended.recomputed_tokens[0])
        pairs = zip(blended.cache.attention_layers, whole.layers, strict=True)
        errors.append(sum(float((a.keys[0] - b.keys).square().sum() + (a.values[0] - b.values).square().sum())
                          for a, b in pairs))  # fmt: skip
    assert counts == [0, 9, 14, 45, 90]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1 > errors[-1]
    wanted = full_logits(reference, torch.cat([*parts, question]), 5)
    torch.testing.assert_close(blended_logits(model, chunks, question, "blend(ratio=1.0)"), wanted, rtol=0.0, atol=1e-4)
    moved = selective_reference(reference, parts, question, [])
    torch.testing.assert_close(blended_logits(model, chunks, question, "blend(ratio=0)"), moved, rtol=0.0, atol=1e-4)
    assert float((moved - wanted).abs().max()) > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_b57_every_family_passes_the_check_and_a_broken_rotation_is_refused(family: str, own_model: Models) -> None:
    model = own_model(family)
    require_exact(model)
    chunks = read_all(model, passages((6, 7)))
    blend_chunks(model, [chunks])
    rotary = model.model.rotary_emb
    names = [name for name, _ in rotary.named_buffers() if name.endswith("inv_freq") and "original" not in name]
    for name in names:
        setattr(rotary, name, getattr(rotary, name) * 1.03)
    for _ in range(2):  # and it is not forgotten
        with pytest.raises(UnsupportedModelError, match=r"keys that are moved .* are not those that layer"):
            blend_chunks(model, [chunks])
    for name in names:
        setattr(rotary, name, getattr(rotary, name) / 1.03)
    blend_chunks(model, [chunks])


CORPUS = [
    "The lighthouse keeper grows blue tomatoes. ", "Route 66 has 2,448 miles of road; 17 towns lie on it.\n",
    "Grüße aus Köln! 🙂 Ein Kaffee, bitte.\n\n", "one two three four five six seven eight nine ten",
]  # fmt: skip
ENDINGS = [
    "ends in letters",
    "ends in spaces   ",
    "ends in digits 12345",
    "ends in an emoji 🙂",
    "ends in a line\n",
    "x",
]


def byte_level() -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        CORPUS * 4,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<pad>", "<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )  # fmt: skip
    return core


def sentence_pieces() -> Tokenizer:
    """Spaces become part of words, and every text begins with one: the way of Llama 2."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<pad>", "<s>", "<unk>", *fallback], show_progress=False
    )
    core.train_from_iterator(CORPUS * 4, trainer)
    return core


def word_pieces() -> Tokenizer:
    """Pieces of words, white space dropped, and an end token that the tokenizer puts behind every text as well."""
    core = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.train_from_iterator(
        CORPUS * 4,
        trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["<pad>", "<s>", "<unk>", "</s>"], show_progress=False
        ),
    )
    return core


TOKENIZERS = {
    "byte level": (byte_level, "<s> $A"),
    "sentence pieces": (sentence_pieces, "<s> $A"),
    "word pieces": (word_pieces, "<s> $A </s>"),
}


def with_bos(name: str) -> PreTrainedTokenizerFast:
    make, template = TOKENIZERS[name]
    core = make()
    special = [(token, core.token_to_id(token)) for token in ("<s>", "</s>") if core.token_to_id(token) is not None]
    core.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", pad_token="<pad>", padding_side="left")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_b58_the_ids_that_are_read_are_those_that_are_looked_up(name: str, own_model: Models) -> None:
    tokenizer = with_bos(name)
    model = own_model("llama", vocab_size=len(tokenizer))
    bos = tokenizer.bos_token_id
    with kvfoundry.ChunkStore("host:64MiB") as store:
        blended_cache(model, tokenizer, ENDINGS, "And now?", store=store, head="Read this: ")
        for order in (ENDINGS[::-1], ENDINGS[2:] + ENDINGS[:2]):
            found = blended_cache(model, tokenizer, order, "And now?", store=store, head="Read this: ")
            (prompt,) = found.segments
            assert all(passage.hit for passage in found.passages[0])
            assert found.reused_tokens == [sum(map(len, prompt.passages))]
            read = [*found.blended.context_ids[0].tolist(), *found.blended.question_ids[0].tolist()]
            assert read == prompt.ids
            assert read.count(bos) == 1 and read[0] == bos
            looked_up = [tokenizer(text + "\n\n", add_special_tokens=False)["input_ids"] for text in order]
            assert [list(passage) for passage in prompt.passages] == looked_up
    assert segment(tokenizer, ["<s>a text with the token written out"]).ids.count(bos) == 1


@pytest.mark.parametrize("seed", range(3))
def test_b60_no_token_is_lost_at_a_seam(seed: int, tiny_model: Models, tokenizer: PreTrainedTokenizerFast) -> None:
    """Documents of 100, 257 and 511 tokens in any order: the constant per seam is 0."""
    model, lengths = tiny_model("llama"), (100, 257, 511)
    documents = [words(length, 40 + length) for length in lengths]
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed)).tolist()
    with kvfoundry.ChunkStore("host:64MiB") as store:
        blended_cache(model, tokenizer, documents, "w5", store=store)
        found = blended_cache(model, tokenizer, [documents[i] for i in order], "w5", store=store)
    assert [passage.tokens for passage in found.passages[0]] == [lengths[i] for i in order]
    assert found.reused_tokens == [868]
    assert found.blended.cache.seen_tokens == 868


def test_b62_what_a_partial_hit_computes_is_stored(
    tiny_model: Models, tokenizer: PreTrainedTokenizerFast, store: kvfoundry.ChunkStore
) -> None:
    ask = Asker(tiny_model("llama"), tokenizer, store)
    old, new = [words(12, 1), words(9, 2)], words(21, 3)
    assert ask(old).reused_tokens == 0
    partly = ask([old[1], new, old[0]])
    assert partly.reused_tokens == 21
    assert "2 of 3 documents were in the store." in partly.notes
    again = ask([new])
    assert again.reused_tokens == 21
    assert "1 of 1 documents were in the store." in again.notes


@pytest.mark.parametrize("tokens", [1, 2, 12])
def test_b64_a_very_short_document_is_stored_and_hit(
    tokens: int, tiny_model: Models, tokenizer: PreTrainedTokenizerFast, store: kvfoundry.ChunkStore
) -> None:
    ask, document = Asker(tiny_model("llama"), tokenizer, store), words(tokens, 8)
    first, second = ask([document]), ask([document])
    assert (first.reused_tokens, second.reused_tokens) == (0, tokens)
    assert first.text == second.text
    with pytest.raises(DataError, match="document 1 is empty"):
        ask([document, "  "])


def test_a_request_of_many_prompts_answers_each_as_alone(
    tiny_model: Models, tokenizer: PreTrainedTokenizerFast, store: kvfoundry.ChunkStore
) -> None:
    model = tiny_model("llama")
    prompts = [([words(20, 1), words(9, 2)], "w5 w6"), ([words(7, 3)], "w9 w8 w7 w6")]
    together = kvfoundry.generate(
        model, tokenizer, [question for _, question in prompts], documents=[own for own, _ in prompts],
        store=store, max_new_tokens=6, details=True, blend="blend(ratio=0.3)",
    )  # fmt: skip
    for answer, (documents, question) in zip(together, prompts, strict=True):
        alone = Asker(model, tokenizer, store)(documents, question, blend="blend(ratio=0.3)")
        assert (answer.text, answer.recomputed_tokens) == (alone.text, alone.recomputed_tokens)
        assert alone.reused_tokens == answer.prompt_tokens - len(question.split())
    blended = blended_cache(model, tokenizer, [words(20, 1)], ["w5", "w6 w7"], store=store, blend="blend(ratio=1.0)")
    assert asked(model, blended.blended).shape[:2] == (2, 2)
