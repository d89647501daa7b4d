"""A BERT-like encoder run through transformers itself: one pass gives the vector of a text and those of its tokens.

The vector of a text is the mean over its tokens, as the model was trained; sentence-transformers, which is slow to
import, gives the same numbers in two passes. The token vectors are those of late interaction (Khattab and Zaharia,
2020, arXiv 2004.12832): in passages punctuation is left out.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from kvfoundry.embedded import first_line
from kvfoundry.errors import ModelLoadError
from kvfoundry.evaluate.tasks.ragqa_data import Passage
from kvfoundry.fingerprint import fingerprint, weights_of
from kvfoundry.quiet import quiet
from kvfoundry.rag.encoders.base import TEXT_FORM, Vectors, passage_text

_BATCH = 32
# Batches of a stretch are sorted by length, and a stretch is also what a reader waits for.
_STRETCH = 8 * _BATCH


class MeanPooledEncoder:
    """An encoder from a local folder.

    Args:
        folder: weights, configuration and tokenizer.
        limit: tokens of a text that are read, at most the model's positions. all-MiniLM is published with 256; reading
            512 does not find more (see docs/retrieval.md).
        name: what to call it in messages and files.

    Raises:
        ModelLoadError: the folder cannot be read as such a model.
    """

    makes = frozenset({"pooled", "tokens"})

    def __init__(self, folder: Path, *, limit: int = 256, name: str | None = None, device: str = "cpu"):
        self.name, self._device = name or str(folder), device
        try:
            with quiet():
                self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
                model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        except Exception as error:  # whatever a library raises on a file of the user's is an answer about that file
            raise ModelLoadError(
                f"cannot load the encoder {self.name!r} ({first_line(error)}); check the folder {folder}."
            ) from error
        self._model = model.eval().to(device)
        self.limit = min(limit, getattr(model.config, "max_position_embeddings", limit))
        marks = [self._tokenizer.convert_tokens_to_ids(mark) for mark in string.punctuation]
        known = {mark for mark in marks if mark is not None and mark != self._tokenizer.unk_token_id}
        self._punctuation = torch.tensor(sorted(known), dtype=torch.long)
        self.digest = f"{fingerprint(weights_of(model))[:16]}-{self.limit}-{TEXT_FORM}"

    def passages(self, passages: Sequence[Passage], want: frozenset[str]) -> Iterator[Vectors]:
        """The vectors of passages, in their order."""
        texts = [passage_text(passage) for passage in passages]
        for start in range(0, len(texts), _STRETCH):
            yield from self._stretch(texts[start : start + _STRETCH], want)

    def question(self, text: str, want: frozenset[str]) -> Vectors:
        """The vectors of one question: every token counts."""
        return self._encode([text], want, skip_punctuation=False)[0]

    def _stretch(self, texts: list[str], want: frozenset[str]) -> list[Vectors]:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found: dict[int, Vectors] = {}
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            found |= zip(batch, self._encode([texts[i] for i in batch], want, skip_punctuation=True), strict=True)
        return [found[i] for i in range(len(texts))]

    @torch.inference_mode()
    def _encode(self, texts: list[str], want: frozenset[str], skip_punctuation: bool) -> list[Vectors]:
        # one token more than is read tells a text that is cut from one that just fits
        ids = [self._tokenizer(text, truncation=True, max_length=self.limit + 1).input_ids for text in texts]
        cut = [len(each) > self.limit for each in ids]
        read = self._tokenizer(texts, padding=True, truncation=True, max_length=self.limit, return_tensors="pt")
        hidden = self._model(**read.to(self._device)).last_hidden_state.float().cpu()
        mask = read.attention_mask.cpu().bool()
        input_ids = read.input_ids.cpu()
        return [
            Vectors(
                pooled=normalize(rows[real].mean(0), dim=0).clone() if "pooled" in want else None,
                tokens=self._token_vectors(rows[real], told[real], skip_punctuation) if "tokens" in want else None,
                cut=is_cut,
            )
            for rows, real, told, is_cut in zip(hidden, mask, input_ids, cut, strict=True)
        ]

    def _token_vectors(self, rows: Tensor, ids: Tensor, skip_punctuation: bool) -> Tensor:
        kept = ~torch.isin(ids, self._punctuation) if skip_punctuation else torch.ones_like(ids, dtype=torch.bool)
        return normalize(rows[kept], dim=1)
