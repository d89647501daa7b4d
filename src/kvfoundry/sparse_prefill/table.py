"""The pattern of every head of one model, and its files: ours, with the model's identity, and the authors'."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfoundry.errors import DataError, SpecError
from kvfoundry.sparse_prefill.a_shape import AShape
from kvfoundry.sparse_prefill.block_sparse import BlockSparse
from kvfoundry.sparse_prefill.patterns import Pattern
from kvfoundry.sparse_prefill.vertical_slash import VerticalSlash

if TYPE_CHECKING:
    from kvfoundry.selection.budgets import ModelShape

_FORMAT = "kvfoundry-minference-1"
# Our words for a kind, and what a file says about a pattern of it.
_KINDS: dict[str, type[Pattern]] = {"a_shape": AShape, "vertical_slash": VerticalSlash, "block_sparse": BlockSparse}
_SIZES = {"a_shape": ("first", "local"), "vertical_slash": ("vertical", "slash"), "block_sparse": ("blocks",)}
_AUTHORS = {"stream_llm": "a_shape", "vertical_and_slash": "vertical_slash", "block_sparse": "block_sparse"}
# The authors' kernel reads so many blocks, whatever their files say.
_AUTHORS_BLOCKS = 100


@dataclass(frozen=True)
class PatternTable:
    """patterns: [full-attention layers][query heads]. model: identity of the model they were searched on, as pairs;
    empty for the authors' files, which have none. source: where they came from. about: how they were found."""

    patterns: tuple[tuple[Pattern, ...], ...]
    model: tuple[tuple[str, Any], ...] = ()
    source: str = field(default="given", compare=False)
    about: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def check(self, shape: ModelShape) -> None:
        """SpecError when the table was made for another model."""
        identity = shape.identity() if self.model else {}
        for name, measured in self.model:
            if measured != identity.get(name):
                raise SpecError(
                    f"the patterns {self.source!r} were searched on another model ({name} {measured!r}, here "
                    f"{identity.get(name)!r}); search for {shape.family} with `kvfoundry calibrate --for minference`."
                )
        found, wanted = (len(self.patterns), len(self.patterns[0])), (len(shape.full_layers), shape.query_heads)
        if found != wanted:
            raise SpecError(
                f"the patterns {self.source!r} are of {found[0]} layers of {found[1]} heads, {shape.family} has "
                f"{wanted[0]} full-attention layers of {wanted[1]} query heads; search for it with "
                "`kvfoundry calibrate --for minference`."
            )

    def save(self, path: str | Path) -> None:
        """Write a JSON file; DataError when it cannot be written."""
        rows = {
            f"{layer}-{head}": {"pattern": (kind := _kind(pattern))} | {n: getattr(pattern, n) for n in _SIZES[kind]}
            for layer, row in enumerate(self.patterns)
            for head, pattern in enumerate(row)
        }
        content = {"format": _FORMAT, "model": dict(self.model), "about": dict(self.about), "patterns": rows}
        try:
            Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise DataError(f"cannot write the patterns {str(path)!r}: {error.strerror}.") from error

    @classmethod
    def read(cls, source: str | Path, default: VerticalSlash) -> PatternTable:
        """From a file of `save`, or from one in the authors' published form: a list with, for every layer, "head" ->
        [name, first size, second size, ...].

        default: has what a file does not say about vertical-slash heads. SpecError for anything else.
        """
        path = Path(source).expanduser()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
            raise SpecError(f"cannot read the patterns {str(path)!r}: {reason}.") from error
        try:
            if isinstance(content, list):
                rows = [{int(head): _of_authors(entry, default) for head, entry in row.items()} for row in content]
                return cls(_rectangle(rows), source=str(path))
            if content["format"] != _FORMAT:
                raise KeyError("format")
            found: dict[int, dict[int, Pattern]] = {}
            for place, entry in content["patterns"].items():
                layer, head = map(int, place.split("-"))
                found.setdefault(layer, {})[head] = _of_file(entry, default)
            rows = [found[layer] for layer in range(len(found))]
            return cls(_rectangle(rows), tuple(content["model"].items()), str(path), content["about"])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, SpecError) as error:
            raise SpecError(f"{str(path)!r} is no table of patterns for minference, or it is damaged.") from error


def counts_of(table: PatternTable) -> dict[str, int]:
    """How many heads have each kind of pattern."""
    found: dict[str, int] = dict.fromkeys(_KINDS, 0)
    for row in table.patterns:
        for pattern in row:
            found[_kind(pattern)] += 1
    return found


def _kind(pattern: Pattern) -> str:
    return next(name for name, kind in _KINDS.items() if type(pattern) is kind)


def _of_file(entry: Mapping[str, Any], default: VerticalSlash) -> Pattern:
    kind = entry["pattern"]
    sizes = {name: entry[name] for name in _SIZES[kind]}
    return _KINDS[kind](**(asdict(default) if kind == "vertical_slash" else {}) | sizes)


def _of_authors(entry: list[Any], default: VerticalSlash) -> Pattern:
    kind = _AUTHORS[entry[0]]
    sizes = (_AUTHORS_BLOCKS,) if kind == "block_sparse" else entry[1:3]
    return _of_file({"pattern": kind, **dict(zip(_SIZES[kind], sizes, strict=True))}, default)


def _rectangle(rows: list[dict[int, Pattern]]) -> tuple[tuple[Pattern, ...], ...]:
    heads = len(rows[0])
    if not heads:
        raise ValueError("no heads")
    return tuple(tuple(row[head] for head in range(heads)) for row in rows)
