"""What a connector has loaded, saved and missed since it was last asked, as plain numbers that add up."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from kvfoundry.chunks.report import Report

# What vLLM gets: name -> number, or name -> {label: number}.
Numbers = dict[str, Any]


class Counts:
    """Counts from any thread; `taken` gives the numbers since the last call."""

    def __init__(self) -> None:
        self.report = Report()
        self._lock = threading.Lock()
        self._told: Numbers = {}
        self._numbers: dict[str, float] = {}
        self._dropped: dict[str, float] = {}

    def _add(self, **numbers: float) -> None:
        with self._lock:
            for name, number in numbers.items():
                self._numbers[name] = self._numbers.get(name, 0) + number

    def looked_up(self, tokens: int, *, there: bool) -> None:
        """A span of a prompt was looked up."""
        self._add(lookups=1, **({"found_tokens": tokens} if there else {"absent_tokens": tokens}))

    def loaded(self, tokens: int, *, moved: bool = False) -> None:
        """Rows are in vLLM's blocks. moved: of a document that was read at another place."""
        self._add(loaded_tokens=tokens, **({"moved_tokens": tokens} if moved else {}))

    def recomputed(self, tokens: int) -> None:
        """Tokens of documents were computed again, by the copy of the model."""
        self._add(recomputed_tokens=tokens)

    def loaded_in(self, seconds: float) -> None:
        """One load took so long."""
        self._add(loads=1, load_seconds=seconds)

    def saved(self, tokens: int) -> None:
        """Rows are in the store."""
        self._add(saved_tokens=tokens)

    def dropped(self, tokens: int, reason: str) -> None:
        """Rows that were to be saved and are not."""
        with self._lock:
            self._dropped[reason] = self._dropped.get(reason, 0) + tokens

    def taken(self) -> Numbers:
        """The numbers since the last call; empty when nothing happened."""
        report = self.report.as_dict()
        with self._lock:
            total: Numbers = {
                "hits": report["hits"],
                "read_bytes": report["bytes_read"],
                "written_bytes": report["bytes_written"],
                "misses": _by_kind(report["misses"]),
            }
            new = _difference(total, self._told)
            new |= self._numbers | ({"dropped_tokens": self._dropped} if self._dropped else {})
            self._told, self._numbers, self._dropped = total, {}, {}
        return new


def _by_kind(reasons: Mapping[str, int]) -> dict[str, int]:
    """Reasons without what is different every time, so that few labels are made of them."""
    kinds: dict[str, int] = {}
    for reason, count in reasons.items():
        kind = reason.partition(",")[0]
        kinds[kind] = kinds.get(kind, 0) + count
    return kinds


def _difference(now: Numbers, before: Numbers) -> Numbers:
    """Label by label, only what has grown."""
    grown = {
        name: {label: n - before.get(name, {}).get(label, 0) for label, n in held.items()} for name, held in now.items()
    }
    return {name: {label: n for label, n in held.items() if n} for name, held in grown.items() if any(held.values())}


def added(one: Mapping[str, Any], other: Mapping[str, Any]) -> Numbers:
    """The sum of two sets of numbers, label by label."""
    total: Numbers = dict(one)
    for name, number in other.items():
        held = total.get(name)
        if held is None:
            total[name] = dict(number) if isinstance(number, Mapping) else number
        elif isinstance(number, Mapping):
            total[name] = added(held, number)
        else:
            total[name] = held + number
    return total


def reduced(numbers: Mapping[str, Any]) -> dict[str, float]:
    """One flat line for a log: labelled numbers become `name.label`."""
    flat: dict[str, float] = {}
    for name, number in numbers.items():
        if isinstance(number, Mapping):
            flat |= {f"{name}.{label}": each for label, each in number.items()}
        else:
            flat[name] = round(number, 3)
    return flat
