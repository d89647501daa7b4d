"""How much memory of the device chunks may take: a size, or room for a share of a sample's chunks."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvfoundry.chunks.config import parsed_size
from kvfoundry.errors import SpecError

_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True)
class Room:
    """nbytes: for the rows of passages that are resident at one time.

    share: instead, room for this share of a sample's candidates, rounded up, whichever they are.
    """

    nbytes: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> Room:
        """ "64MiB", "50%" or "all". SpecError for anything else."""
        if text.strip().lower() == "all":
            return cls(share=1.0)
        if found := _SHARE.fullmatch(text):
            share = float(found[1]) / 100
            if not 0 < share <= 1:
                raise SpecError(f"a share of the device is above 0% and at most 100%, got {text!r}.")
            return cls(share=share)
        try:
            return cls(nbytes=parsed_size(text))
        except ValueError as error:
            raise SpecError(f"--device-size is a size such as 64MiB, a share such as 50%, or all: {error}.") from error

    def of(self, sizes: Sequence[int]) -> int:
        """Bytes for a sample whose candidates take these."""
        if self.nbytes is not None:
            return self.nbytes
        assert self.share is not None
        return sum(sorted(sizes, reverse=True)[: math.ceil(self.share * len(sizes) - 1e-9)])

    def __str__(self) -> str:
        return f"{self.nbytes}" if self.nbytes is not None else f"{100 * (self.share or 0):g}%"


def first_residents(sizes: Sequence[int], ranks: Sequence[int], found: Sequence[bool], room: int) -> set[int]:
    """The best of those that were found, as many as fit one after the other.

    sizes: bytes of every candidate; ranks: of each, 0 for the best.
    """
    chosen: set[int] = set()
    taken = 0
    for number in sorted(range(len(sizes)), key=lambda each: ranks[each]):
        if not found[number] or taken + sizes[number] > room:
            break
        chosen.add(number)
        taken += sizes[number]
    return chosen
