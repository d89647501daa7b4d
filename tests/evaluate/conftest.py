"""A tiny random Llama and a word-level tokenizer, made here: nothing is downloaded."""

import itertools
import re

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvfoundry.evaluate.metrics import words_of
from kvfoundry.evaluate.tasks.haystack import generated_sentences
from kvfoundry.evaluate.tasks.needles import CITIES, KINDS

CHAT_TEMPLATE = (
    "{% for message in messages %}[user] {{ message['content'] }} [end] {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    text = "".join(itertools.islice(generated_sentences("vocabulary"), 400))
    text += " ".join([*CITIES, *(f"{kind.question} {' '.join(kind.answers or ())}" for kind in KINDS.values())])
    words = sorted({*words_of(text), *re.findall(r"\w+", text)})
    vocabulary = {
        word: index for index, word in enumerate(["[unk]", "[pad]", "[eos]", "[user]", "[end]", "[assistant]", *words])
    }
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="[unk]",
        pad_token="[pad]",
        eos_token="[eos]",
        additional_special_tokens=["[user]", "[end]", "[assistant]"],
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def model(tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=1, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model_folder(model, tokenizer, tmp_path_factory):
    """The tiny model saved, for commands that load a folder."""
    folder = tmp_path_factory.mktemp("tiny-model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
