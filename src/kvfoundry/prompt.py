"""Where the prompt ends, and what else the layers of one cache know of each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfoundry.coding import Losses
from kvfoundry.sparse_prefill.work import Work


@dataclass
class Prompt:
    """What the layers of one cache share.

    tokens: the column where the prompt ends, None until it is known; start: the column where it begins, above 0 when
    another text goes before it. losses: what the codec was measured to lose. nbytes, peak_nbytes: bytes that all layers
    hold together, as each of them last noted, and the largest sum so far. work: what a sparse prompt computed.
    """

    tokens: int | None = None
    start: int = 0
    losses: Losses = field(default_factory=Losses)
    work: Work = field(default_factory=Work)
    nbytes: int = 0
    peak_nbytes: int = 0

    def ended(self, seen: int) -> bool:
        """Whether all of the prompt is among the `seen` columns."""
        return self.tokens is not None and seen >= self.tokens

    def expect(self, columns: int, seen: int) -> None:
        """The prompt has `columns` columns, `seen` of the cache's columns are there."""
        self.start = min(self.start, seen)
        self.tokens = self.start + columns

    def enter(self, seen: int, columns: int) -> bool:
        """Whether a call of so many columns belongs to the prompt; unless announced, the first call is all of it."""
        if self.tokens is None:
            self.tokens = seen + columns
        return seen < self.tokens

    def begin_anew(self, seen: int) -> None:
        """What follows is a prompt again. One that has been announced and is not complete yet goes on."""
        if self.ended(seen):
            self.start, self.tokens = seen, None

    def note(self, change: int) -> None:
        """A layer has grown by so many bytes."""
        self.nbytes += change
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def forget(self) -> None:
        """Back to an empty cache, after all layers have noted that they are empty."""
        self.tokens, self.start, self.losses, self.work, self.peak_nbytes = None, 0, Losses(), Work(), 0
