"""The register of retriever pieces: one decorated dataclass per name, found by scanning this folder."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Literal, TypeVar

from kvfoundry.errors import SpecError, unknown_name

Kind = Literal["scorer", "fusion", "stage"]
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Registered:
    """A registered name; its parameters are the fields of the dataclass, with their defaults."""

    name: str
    kind: Kind
    summary: str
    build: Callable[..., Any]
    parameters: dict[str, Any]


_ENTRIES: dict[str, Registered] = {}


def register(kind: Kind) -> Callable[[C], C]:
    """Enter a frozen dataclass under its `name`."""

    def enter(cls: C) -> C:
        made: Any = cls
        parameters = {field.name: field.default for field in fields(made)}
        summary = (inspect.getdoc(cls) or "").split("\n", 1)[0].rstrip(".")
        if made.name in _ENTRIES and _ENTRIES[made.name].build.__module__ != cls.__module__:
            raise SpecError(f"the retriever name {made.name!r} is taken by {_ENTRIES[made.name].build.__module__}.")
        _ENTRIES[made.name] = Registered(made.name, kind, summary, cls, parameters)
        return cls

    return enter


def retriever_pieces() -> dict[str, Registered]:
    """Every registered name, in alphabetical order. The files are imported on the first call."""
    package = import_module("kvfoundry.rag.retrievers")
    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"kvfoundry.rag.retrievers.{module.name}")
    return dict(sorted(_ENTRIES.items()))


def piece(name: str) -> Registered:
    """The entry of a name; SpecError with the nearest names when there is none."""
    known = retriever_pieces()
    if name not in known:
        raise SpecError(unknown_name("retriever", name, known))
    return known[name]
