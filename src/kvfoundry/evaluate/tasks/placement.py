"""Where a fact goes in a text, and what of the text stays when it has to be shorter: pure functions."""

import itertools
import math
from collections.abc import Callable, Sequence

PLACEMENTS = {
    "nearest": "between the two sentences nearest to the depth; too long a text loses its middle",
    "stop": "at the full-stop token before the depth, as first published; too long a text loses its end",
    "token": "exactly at the depth, inside a sentence too; too long a text loses its end",
}


def truncate_middle(sizes: Sequence[int], budget: int) -> tuple[int, int]:
    """How many leading and trailing pieces to keep so that their sizes sum to at most `budget`.

    Pieces are dropped from the middle; head and tail are taken in turn, so that each gets about half.
    """
    if sum(sizes) <= budget:
        return len(sizes), 0
    head = tail = used = 0
    while head + tail < len(sizes):
        from_head = head <= tail
        size = sizes[head] if from_head else sizes[-1 - tail]
        if used + size > budget:
            break
        used += size
        head, tail = (head + 1, tail) if from_head else (head, tail + 1)
    return head, tail


def insert_at_depths(sentences: Sequence[str], sizes: Sequence[int], needles: Sequence[tuple[float, str]]) -> str:
    """The text with each (depth in percent, needle) at the sentence boundary nearest to that share of the tokens."""
    boundaries = list(itertools.accumulate(sizes, initial=0))
    slots: dict[int, list[str]] = {}
    for depth, needle in needles:
        target = boundaries[-1] * depth / 100
        slots.setdefault(min(range(len(boundaries)), key=lambda index: abs(boundaries[index] - target)), []).append(
            " " + needle
        )
    pieces: list[str] = []
    for index in range(len(boundaries)):
        pieces += slots.get(index, [])
        pieces += sentences[index : index + 1]
    return "".join(pieces).strip()


def insertion_point(tokens: int, depth: float, is_stop: Callable[[int], bool] | None = None) -> int:
    """The token of a text in front of which a needle of this depth in percent goes; `tokens` puts it at the end.

    That is int(tokens * depth / 100). With `is_stop`, it moves back until the token before it is a full stop, or to 0;
    depth 100 stays the end. Source: G. Kamradt, "Needle In A Haystack - pressure testing LLMs" (2023).
    """
    point = int(tokens * depth / 100)
    if is_stop is not None and depth < 100:
        while point > 0 and not is_stop(point - 1):
            point -= 1
    return point


def insert_at_tokens(
    text: str, spans: Sequence[tuple[int, int]], room: int, needles: Sequence[tuple[float, str]], to_stop: bool
) -> str:
    """The first `room` tokens of the text with each (depth in percent, needle) in front of a token.

    spans: where each token of the text begins and ends. to_stop: go back to the full stop before, where a full stop is
    a token by itself, as in the published test; one that is glued to a word is passed over.
    """
    spans = spans[:room]

    def is_stop(token: int) -> bool:
        start, end = spans[token]
        return text[start:end].strip() == "."

    pieces: list[str] = []
    done = 0
    for depth, needle in sorted(needles, key=lambda placed: placed[0]):
        point = insertion_point(len(spans), depth, is_stop if to_stop else None)
        at = spans[point - 1][1] if point else 0
        pieces += [text[done:at], f" {needle}" if at else f"{needle} "]
        done = at
    pieces.append(text[done : spans[-1][1] if spans else 0])
    return "".join(pieces).strip()


def depth_grid(count: int, spacing: str = "linear") -> tuple[float, ...]:
    """`count` rising depths from 0 to 100 in whole percent; "sigmoid" spacing puts more of them near both ends.

    Raises:
        ValueError: fewer than two depths, or an unknown spacing.
    """
    if count < 2 or spacing not in ("linear", "sigmoid"):
        raise ValueError("give at least two depths, and linear or sigmoid spacing")
    places = [round(100 * step / (count - 1)) for step in range(count)]
    return tuple(float(place) if spacing == "linear" else logistic_depth(place) for place in places)


def logistic_depth(place: float) -> float:
    """Depth of an evenly spaced place in [0, 100] under sigmoid spacing, the end points kept, to three decimals."""
    return float(place) if place in (0, 100) else round(100 / (1 + math.exp(-0.1 * (place - 50))), 3)
