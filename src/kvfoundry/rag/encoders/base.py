"""What an encoder is: text in, unit vectors out, one for the whole text, one for each of its tokens, or both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvfoundry.evaluate.tasks.ragqa_data import Passage

# Part of every encoder's digest: raised when `passage_text` changes, so that old vectors are not taken for new ones.
TEXT_FORM = 1


@dataclass(frozen=True, eq=False)
class Vectors:
    """One text as unit vectors, float32 on the CPU.

    Attributes:
        pooled: [dimensions], None where the encoder makes no vector of a whole text.
        tokens: [tokens, token_dimensions], None where the encoder makes none of single tokens.
        cut: the text is longer than what the encoder reads; its end is not in the vectors.
    """

    pooled: Tensor | None
    tokens: Tensor | None
    cut: bool = False


class Encoder(Protocol):
    """A model that turns questions and passages into vectors.

    Attributes:
        name: what the user calls it.
        digest: changes with anything that changes a vector.
        limit: tokens of a text that it reads.
        makes: "pooled", "tokens" or both.
    """

    name: str
    digest: str
    limit: int
    makes: frozenset[str]

    def passages(self, passages: Sequence[Passage], want: frozenset[str]) -> Iterator[Vectors]:
        """The vectors of passages, in their order; `want`: which of `makes` are needed."""
        ...

    def question(self, text: str, want: frozenset[str]) -> Vectors:
        """The vectors of one question."""
        ...


def passage_text(passage: Passage) -> str:
    """A passage as an encoder reads it: its title leads as a sentence of its own."""
    return f"{passage.title}. {passage.text}" if passage.title else passage.text
