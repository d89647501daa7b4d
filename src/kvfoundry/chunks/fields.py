"""Values that came from outside: each is of the kind that was stored, or DataError says what it is instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from kvfoundry.errors import DataError

T = TypeVar("T")


def word(value: Any, allowed: Sequence[T]) -> T:
    if value not in allowed:
        raise DataError(f"the chunk says {value!r}, which is none of {', '.join(map(str, allowed))}.")
    return allowed[list(allowed).index(value)]


def whole_number(value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(f"the chunk says {value!r} where a whole number of at least {least} belongs.")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"the chunk names its method {value!r}, which is no text.")
    return value
