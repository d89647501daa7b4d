"""Two encoders as one: vectors of whole texts from the first, of their tokens from the second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvfoundry.evaluate.tasks.ragqa_data import Passage
from kvfoundry.rag.encoders.base import Encoder, Vectors

_POOLED, _TOKENS = frozenset({"pooled"}), frozenset({"tokens"})


class PairedEncoder:
    """`whole` makes the vectors of texts, `tokens` those of tokens; each is asked only for what is wanted of it."""

    makes = _POOLED | _TOKENS

    def __init__(self, whole: Encoder, tokens: Encoder):
        self._whole, self._tokens = whole, tokens
        self.name = f"{whole.name} and {tokens.name}"
        self.digest = f"{whole.digest}+{tokens.digest}"
        self.limit = min(whole.limit, tokens.limit)

    def passages(self, passages: Sequence[Passage], want: frozenset[str]) -> Iterator[Vectors]:
        """The vectors of passages, in their order."""
        if want & _TOKENS == want:
            yield from self._tokens.passages(passages, want)
        elif want & _POOLED == want:
            yield from self._whole.passages(passages, want)
        else:
            both = (self._whole.passages(passages, _POOLED), self._tokens.passages(passages, _TOKENS))
            for whole, tokens in zip(*both, strict=True):
                yield Vectors(whole.pooled, tokens.tokens, whole.cut or tokens.cut)

    def question(self, text: str, want: frozenset[str]) -> Vectors:
        """The vectors of one question."""
        pooled = self._whole.question(text, _POOLED).pooled if want & _POOLED else None
        tokens = self._tokens.question(text, _TOKENS).tokens if want & _TOKENS else None
        return Vectors(pooled, tokens)
