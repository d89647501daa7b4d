"""The ends of a prompt: true text, whole tokens, and no places where the tokenizer does not give them."""

import itertools

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvfoundry.evaluate.excerpts import EXCERPT, excerpt
from kvfoundry.evaluate.tasks.haystack import generated_sentences

TEXT = "".join(itertools.islice(generated_sentences("ends"), 400))


@pytest.fixture(scope="module")
def byte_level():
    """Bytes as tokens, so that one character may be several tokens, and a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {symbol: number for number, symbol in enumerate([*alphabet, "th", "Ġth", "the", "Ġthe", "<s>"])}
    core = Tokenizer(models.BPE(words, [("t", "h"), ("Ġ", "th"), ("th", "e"), ("Ġth", "e")]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")


def check(tokenizer, ids, found):
    """Sizes follow the tokens: each piece decodes from its own token, unless a character is cut."""
    for name, own in (("head", ids), ("tail", ids[len(ids) - len(found["tail_sizes"]) :])):
        text, sizes, at = found[name], found[f"{name}_sizes"], 0
        assert len(text) <= 2 * EXCERPT and sum(sizes) == len(text)
        for token, size in zip(own, sizes, strict=False):
            alone = tokenizer.decode([token])
            assert "\ufffd" in alone or alone == text[at : at + size]
            at += size


@pytest.mark.parametrize("count", [300, 3500, 9000, len(TEXT)])
def test_pieces_are_the_tokens(byte_level, count):
    ids = byte_level(TEXT[:count])["input_ids"]
    found = excerpt(byte_level, ids)
    check(byte_level, ids, found)
    if count <= 2 * EXCERPT:
        assert (found["head"], found["tail"], len(found["head_sizes"])) == (TEXT[:count], "", len(ids))
    else:
        assert TEXT.startswith(found["head"]) and TEXT[:count].endswith(found["tail"])
        assert EXCERPT - 8 < len(found["head"]) <= EXCERPT and EXCERPT - 8 < len(found["tail"]) <= EXCERPT


@pytest.mark.parametrize("text", ["naïve 灯台守 😀 the end", "灯台守は青いトマトを育てる。" * 300])
def test_characters_of_several_tokens_stay_whole(byte_level, text):
    ids = byte_level(text)["input_ids"]
    found = excerpt(byte_level, ids)
    check(byte_level, ids, found)
    assert text.startswith(found["head"]) and text.endswith(found["tail"])


def test_special_tokens_are_shown(byte_level):
    ids = [byte_level.bos_token_id, *byte_level("the end")["input_ids"]]
    found = excerpt(byte_level, ids)
    assert found["head"] == "<s>the end" and found["head_sizes"][0] == 3


def test_no_places_where_the_text_leads_to_other_tokens(byte_level):
    ids = byte_level("t h e")["input_ids"] + byte_level("t")["input_ids"] + byte_level("h")["input_ids"]
    found = excerpt(byte_level, ids)
    assert found["head"] == "t h eth" and found["head_sizes"] is None
    long = ids * 3000
    found = excerpt(byte_level, long)
    assert found["head_sizes"] is None and found["tail_sizes"] is None
    assert len(found["head"]) == len(found["tail"]) == EXCERPT


def test_word_level_tokenizer(tokenizer):
    ids = tokenizer("[user] the river rose [end]")["input_ids"]
    found = excerpt(tokenizer, ids)
    assert len(found["head_sizes"]) == len(ids) and sum(found["head_sizes"]) == len(found["head"])
