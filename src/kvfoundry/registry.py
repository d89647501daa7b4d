"""The register of method pieces: one decorated function per published name, found by scanning `kvfoundry.methods`."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, Literal

from kvfoundry.checks import choice
from kvfoundry.errors import SpecError, unknown_name
from kvfoundry.method import Piece

Kind = Literal["method", "piece"]

# Parameters that every evicting method has, beside its own.
_COMMON: dict[str, tuple[Any, tuple[str, ...]]] = {
    "granularity": ("kv_head", ("kv_head", "query_head")),
    "group": ("mean", ("mean", "max", "sum")),
}


@dataclass(frozen=True)
class MethodInfo:
    """A registered name. parameters: name -> default, `REQUIRED` where a value must be given."""

    name: str
    summary: str
    paper: str
    axes: dict[str, str]
    parameters: dict[str, Any]
    kind: Kind
    build: Callable[..., Piece]


REQUIRED = inspect.Parameter.empty

# Names that people know from elsewhere and that are still to come.
_PLANNED = {
    "headinfer": "rows on the host, streamed head by head",
}

_ENTRIES: dict[str, MethodInfo] = {}


def register(
    *, paper: str, axes: dict[str, str], kind: Kind = "method", evicts: bool = True, group: str = "mean"
) -> Callable[[Callable[..., Piece]], Callable[..., Piece]]:
    """Enter a function under its own name.

    paper: where the method was published (title and arXiv id). axes: axis -> member, one short phrase each, for the
    listing. kind: "method" can stand alone, "piece" only refines one. evicts: adds the common parameters
    `granularity` and `group`; group is the default of the latter.
    """

    def enter(function: Callable[..., Piece]) -> Callable[..., Piece]:
        name = function.__name__.rstrip("_")
        if name in _ENTRIES and _ENTRIES[name].build.__module__ != function.__module__:
            raise SpecError(f"the method name {name!r} is taken by {_ENTRIES[name].build.__module__}.")
        parameters = {key: value.default for key, value in inspect.signature(function).parameters.items()}
        build = function
        if evicts and kind == "method":
            parameters |= {key: default for key, (default, _) in _COMMON.items()} | {"group": group}
            build = _with_common(function)
        summary = (inspect.getdoc(function) or "").split("\n", 1)[0].rstrip(".")
        _ENTRIES[name] = MethodInfo(name, summary, paper, axes, parameters, kind, build)
        return function

    return enter


def _with_common(function: Callable[..., Piece]) -> Callable[..., Piece]:
    def build(*, granularity: str = "kv_head", group: str = "mean", **own: Any) -> Piece:
        common: dict[str, Any] = {"granularity": granularity, "group": group}
        for key, value in common.items():
            choice(key, value, _COMMON[key][1])
        return replace(function(**own), **common)

    build.__module__ = function.__module__
    return build


def entries() -> dict[str, MethodInfo]:
    """Every registered name, in alphabetical order. Method files are imported on the first call."""
    _import_methods()
    return dict(sorted(_ENTRIES.items()))


@cache
def _import_methods() -> None:
    package = import_module("kvfoundry.methods")
    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"kvfoundry.methods.{module.name}")


def entry(name: str) -> MethodInfo:
    """The entry of a name; SpecError with the nearest names when there is none, or that it is still to come."""
    known = entries()
    if name not in known and name in _PLANNED:
        raise SpecError(f"{name} ({_PLANNED[name]}) is not built yet; `kvfoundry methods` lists what is.")
    if name not in known:
        raise SpecError(unknown_name("method", name, known))
    return known[name]
