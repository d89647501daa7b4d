"""What the generators share: an item of which only the amount of filler is open, and what a generator is told."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Filler:
    """A context of any size.

    Attributes:
        context: size -> text with so many units of filler and everything that matters; equal sizes give equal texts.
        smallest, most: the sizes that there are.
        unit: the plural of a unit, for messages.
    """

    context: Callable[[int], str]
    smallest: int
    most: int
    unit: str


@dataclass(frozen=True)
class Draft:
    """One item but for the size of its filler.

    Attributes:
        before: the text in front of the context.
        question: the end of the prompt. answer_prefix: how the answer begins.
    """

    filler: Filler
    before: str
    question: str
    answer_prefix: str
    references: tuple[str, ...]

    def prompt(self, size: int) -> str:
        return self.before + self.filler.context(size) + self.question


@dataclass(frozen=True)
class Setting:
    """What one item is drawn for.

    Attributes:
        name: tells the item from all others; every random choice starts from it.
        length: tokens of prompt and answer together.
        count: tokens of a piece of text.
    """

    name: str
    length: int
    count: Callable[[str], int]

    def rng(self, purpose: str) -> random.Random:
        """Random numbers for one purpose, so that choices of one kind do not move those of another."""
        return random.Random(f"{self.name} {purpose}")

    def part(self, name: str) -> "Setting":
        """The same for a part of the item that is drawn by itself."""
        return replace(self, name=f"{self.name} {name}")
