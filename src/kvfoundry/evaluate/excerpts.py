"""The ends of a prompt as text cut into its tokens: what the report shades by the rows that were kept."""

from collections.abc import Sequence
from itertools import accumulate, pairwise, takewhile
from typing import Any, Literal

# Characters of each end.
EXCERPT = 2000


def excerpt(tokenizer: Any, ids: Sequence[int]) -> dict[str, Any]:
    """Head and tail of the text of these token ids, special tokens included.

    head, tail: at most `EXCERPT` characters each; a text that fits into both together is a head alone.
    head_sizes, tail_sizes: characters (code points) of each token, from the first token on and up to the last one;
    None where the tokenizer does not lead from the text back to the same tokens.
    """
    ids, window = list(ids), 2 * EXCERPT  # a token is seldom less than a character
    if len(ids) <= window:
        text, sizes = _pieces(tokenizer, ids)
        if len(text) <= 2 * EXCERPT:
            return {"head": text, "head_sizes": sizes, "tail": "", "tail_sizes": []}
        ends = (text, sizes), (text, sizes)
    else:
        window = min(window, len(ids) // 2)
        ends = _pieces(tokenizer, ids[:window], goes_on="right"), _pieces(tokenizer, ids[-window:], goes_on="left")
    (head, head_sizes), (tail, tail_sizes) = _head(*ends[0]), _tail(*ends[1])
    return {"head": head, "head_sizes": head_sizes, "tail": tail, "tail_sizes": tail_sizes}


# A text and the characters of each of its tokens.
_Pieces = tuple[str, list[int] | None]

# So many tokens next to a cut through a text may come back as others.
_SEAM = 8


def _pieces(tokenizer: Any, ids: list[int], goes_on: Literal["left", "right"] | None = None) -> _Pieces:
    """The text of the ids in pieces. Where the text goes on, tokens at the cut may be missing from the sizes."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if not getattr(tokenizer, "is_fast", False):
        return text, None
    again = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    found, offsets = list(again["input_ids"]), again["offset_mapping"]
    # A token reaches up to the next one; a character made of several tokens belongs to the last of them.
    starts = [0, *accumulate((start for start, _ in offsets[1:]), max)][: len(offsets)]
    sizes = [end - start for start, end in pairwise([*starts, len(text)])]
    if found == ids:
        return text, sizes
    if goes_on == "right" and (same := _common(found, ids)) >= len(ids) - _SEAM:
        return text, sizes[:same]
    if goes_on == "left" and (same := _common(found[::-1], ids[::-1])) >= len(ids) - _SEAM:
        return text, sizes[-same:]
    return text, None


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading elements agree."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _head(text: str, sizes: list[int] | None) -> _Pieces:
    if sizes is None:
        return text[:EXCERPT], None
    sizes = sizes[: _within(sizes)]
    return text[: sum(sizes)], sizes


def _tail(text: str, sizes: list[int] | None) -> _Pieces:
    if sizes is None:
        return text[-EXCERPT:], None
    sizes = sizes[len(sizes) - _within(sizes[::-1]) :]
    return text[len(text) - sum(sizes) :], sizes


def _within(sizes: Sequence[int]) -> int:
    """How many of the leading sizes sum to at most `EXCERPT`."""
    return sum(total <= EXCERPT for total in accumulate(sizes))
