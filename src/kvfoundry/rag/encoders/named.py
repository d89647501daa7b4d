"""Encoders by name or folder through sentence-transformers: one vector a text, or one a token (ColBERT checkpoints)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import normalize

from kvfoundry.embedded import first_line
from kvfoundry.errors import ModelLoadError
from kvfoundry.evaluate.tasks.ragqa_data import Passage
from kvfoundry.fingerprint import fingerprint, weights_of
from kvfoundry.quiet import quiet
from kvfoundry.rag.encoders.base import TEXT_FORM, Vectors, passage_text
from kvfoundry.rag.extra import load

_BATCH = 32


class _Named:
    """What both kinds share: loading, the digest, and whether a text is cut."""

    _kind = ""

    def __init__(self, name: str, *, device: str = "cpu"):
        library = load("sentence_transformers", f"the encoder {name!r}")
        self.name = name
        try:
            with quiet():
                self._model: Any = getattr(library, self._kind)(name, device=device)
        except Exception as error:  # whatever a library raises on a name or folder of the user's is an answer about it
            raise ModelLoadError(
                f"cannot load the encoder {name!r} ({first_line(error)}); give a sentence-transformers name that the "
                "network reaches, a folder, or 'minilm', which needs no hub."
            ) from error
        self.limit = int(self._model.max_seq_length or 512)
        weights = fingerprint(weights_of(self._model))[:16]
        self.digest = f"{weights}-{self.limit}-{TEXT_FORM}"

    def _cut(self, text: str) -> bool:
        return len(self._model.tokenizer(text, truncation=True, max_length=self.limit + 1)["input_ids"]) > self.limit


class SentenceEncoder(_Named):
    """One vector for a text, by any sentence-transformers model.

    Raises:
        ModelLoadError: no such model.
        MissingExtraError: without the extra `rag`.
    """

    _kind = "SentenceTransformer"
    makes = frozenset({"pooled"})

    def passages(self, passages: Sequence[Passage], want: frozenset[str]) -> Iterator[Vectors]:
        """The vectors of passages, in their order."""
        for start in range(0, len(passages), _BATCH):
            texts = [passage_text(passage) for passage in passages[start : start + _BATCH]]
            rows = self._model.encode_document(texts, convert_to_tensor=True, show_progress_bar=False)
            for text, row in zip(texts, rows.float().cpu(), strict=True):
                yield Vectors(normalize(row, dim=0), None, self._cut(text))

    def question(self, text: str, want: frozenset[str]) -> Vectors:
        """The vector of one question."""
        row = self._model.encode_query(text, convert_to_tensor=True, show_progress_bar=False)
        return Vectors(normalize(row.float().cpu(), dim=0), None)


class LateInteractionEncoder(_Named):
    """One vector for each token, by a multi-vector model: PyLate and Stanford ColBERT checkpoints are read too.

    Raises: as `SentenceEncoder`.
    """

    _kind = "MultiVectorEncoder"
    makes = frozenset({"tokens"})

    def passages(self, passages: Sequence[Passage], want: frozenset[str]) -> Iterator[Vectors]:
        """The vectors of passages, in their order."""
        for start in range(0, len(passages), _BATCH):
            texts = [passage_text(passage) for passage in passages[start : start + _BATCH]]
            found = self._model.encode_document(texts, show_progress_bar=False)
            for text, rows in zip(texts, found, strict=True):
                yield Vectors(None, normalize(torch.as_tensor(rows).float().cpu(), dim=1), self._cut(text))

    def question(self, text: str, want: frozenset[str]) -> Vectors:
        """The vectors of one question, with the query expansion of the checkpoint where it has one."""
        rows = self._model.encode_query(text, show_progress_bar=False)
        return Vectors(None, normalize(torch.as_tensor(rows).float().cpu(), dim=1))
