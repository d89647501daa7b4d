"""The passages of an index at one moment, in memory: what retrievers score."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvfoundry.errors import DataError
from kvfoundry.evaluate.tasks.ragqa_data import Passage
from kvfoundry.rag.vectors.int8 import Rows

T = TypeVar("T")


class Collection:
    """Passages with their vectors; row i of everything belongs to `ids[i]`. Never changed once it is made.

    Args:
        pooled: one vector for each passage, None where the index keeps none.
        tokens: the token vectors of all passages one after the other, None where the index keeps none.
        lengths: [passages], how many token vectors each has.
    """

    def __init__(
        self,
        ids: Sequence[str],
        passages: Sequence[Passage],
        pooled: Rows | None = None,
        tokens: Rows | None = None,
        lengths: Tensor | None = None,
    ):
        self.ids, self.passages = tuple(ids), tuple(passages)
        self.pooled, self.tokens, self.lengths = pooled, tokens, lengths
        self._derived: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def row_of(self) -> dict[str, int]:
        """id -> row."""
        return {name: row for row, name in enumerate(self.ids)}

    @cached_property
    def starts(self) -> Tensor:
        """[passages + 1]: where the token vectors of each passage begin; the last is where all end."""
        assert self.lengths is not None
        return torch.cat([torch.zeros(1, dtype=torch.long), self.lengths.long().cumsum(0)])

    def rows(self, ids: Iterable[str] | None = None) -> Tensor:
        """The rows of these ids, in their order; all rows for None.

        Raises:
            DataError: an id that is not there.
        """
        if ids is None:
            return torch.arange(len(self))
        asked = list(ids)
        absent = [name for name in asked if name not in self.row_of]
        if absent:
            raise DataError(f"the index holds no passage {absent[0]!r} ({len(absent)} of {len(asked)} are absent).")
        return torch.tensor([self.row_of[name] for name in asked], dtype=torch.long)

    def token_rows(self, rows: Tensor) -> tuple[Rows, Tensor]:
        """The token vectors of some passages one after the other, and [vectors]: which of `rows` each belongs to."""
        assert self.tokens is not None and self.lengths is not None
        counts = self.lengths.long()[rows]
        owner = torch.repeat_interleave(torch.arange(len(rows)), counts)
        if len(rows) == len(self) and bool((rows == torch.arange(len(self))).all()):
            return self.tokens, owner
        within = torch.arange(len(owner)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        return self.tokens.take(self.starts[rows][owner] + within), owner

    def derived(self, key: Hashable, make: Callable[[Collection], T]) -> T:
        """What a retriever computes once from all passages, such as word counts."""
        if key not in self._derived:
            self._derived[key] = make(self)
        return self._derived[key]
