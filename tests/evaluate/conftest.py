"""A tiny random Llama, a word-level tokenizer and the data of the docs, made here: nothing is downloaded."""

import itertools
import json
import re
import shutil

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


@pytest.fixture(scope="module")
def workplace(model_folder, tmp_path_factory):
    """A folder with the data that the pages name, and the tiny model with room for their lengths."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "texts").mkdir()
    (folder / "texts" / "book.txt").write_text("".join(itertools.islice(generated_sentences("book"), 400)))
    (folder / "data" / "babilong").mkdir(parents=True)
    record = {"input": "Anna moved to the office.", "question": "Where is Anna?", "target": "office"}
    for name in ("0k_qa1", "1k_qa1", "0k_qa2", "1k_qa2"):
        (folder / "data" / "babilong" / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    prose = "The river rose above the lower step and the roof began to leak. " * 20
    squad = [
        {"context": f"Keeper {number} lives by the mill. {prose}",
         "qas": [{"question": f"Where does keeper {number} live?", "answers": [{"text": "by the mill"}]}]}
        for number in range(12)
    ]  # fmt: skip
    (folder / "data" / "squad.json").write_text(json.dumps({"data": [{"title": "t", "paragraphs": squad}]}))
    hotpot = [
        {"question": "Where is the mill?", "answer": "by the river", "supporting_facts": [[f"Mill {number}", 0]],
         "context": [[f"Mill {number}", ["The mill is by the river."]], [f"Roof {number}", [prose]]]}
        for number in range(12)
    ]  # fmt: skip
    (folder / "data" / "hotpot.json").write_text(json.dumps(hotpot))
    (folder / "data" / "longbench").mkdir()
    sample = {
        "context": prose,
        "input": "Who saw it?",
        "answers": ["the roof"],
        "all_classes": ["the roof"],
        "length": 9,
    }
    for name in ("hotpotqa", "hotpotqa_e", "trec", "lcc"):
        (folder / "data" / "longbench" / f"{name}.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "data" / "dataset2prompt.json").write_text(json.dumps({"hotpotqa": "{context}\n{input}"}))
    passages = {"question": "Who saw it?", "answers": ["the roof"], "ctxs": [{"title": "Roof", "text": prose}]}
    (folder / "data" / "musique_s.json").write_text(json.dumps([passages]))
    (folder / "prompt.txt").write_text(prose[:600] + "\n")
    shutil.copytree(model_folder, folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return folder
