"""Passages and a tiny random encoder for the retrieval tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from kvfoundry.evaluate.tasks.ragqa_data import Passage

TOWNS = {
    "p1": Passage("Grauwick", "Grauwick lies on a ridge and is known for smoked pears."),
    "p2": Passage("Oskholm", "Oskholm is an island of flat rock. Seals rest on the western beach."),
    "p3": Passage("Tollenbeck", "Tollenbeck is a harbour town. The ferry to Oskholm leaves at noon."),
    "p4": Passage("", "A weather station reports the wind every hour."),
}

_WORDS = sorted(
    {word.strip(".").lower() for passage in TOWNS.values() for word in f"{passage.title} {passage.text}".split()} - {""}
    | {"where", "do", "who", "what", "how", "new", "words"}
)


def tiny_encoder_folder(folder: Path, seed: int = 0) -> Path:
    """A BERT of two layers with random weights and one token per word, as transformers saves it."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", ".", ",", *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=64,
    )  # fmt: skip
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    BertModel(config).eval().save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def sample(item: str, question: str, *passages: Passage, gold: tuple[int, ...] = ()) -> dict[str, Any]:
    """A record of the `ctxs` form; gold: places of the passages that are needed, no labels where empty."""
    ctxs: list[dict[str, Any]] = [{"title": each.title, "text": each.text} for each in passages]
    if gold:
        for place, each in enumerate(ctxs):
            each["gold"] = place in gold
    return {"id": item, "question": question, "answers": ["an answer"], "ctxs": ctxs}


def saved(folder: Path, *records: Any, name: str = "towns.json") -> Path:
    """Records as a .json file."""
    path = folder / name
    path.write_text(json.dumps(list(records)))
    return path
