"""The register of selectors: one decorated class per name, found by scanning `kvfoundry.blend.select`."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from kvfoundry.blend.select.base import Selector
from kvfoundry.errors import SpecError, unknown_name

_SELECTORS: dict[str, type[Selector]] = {}


def register(selector: type[Selector]) -> type[Selector]:
    """Enter a selector under its `name`; SpecError when another one has it."""
    taken = _SELECTORS.setdefault(selector.name, selector)
    if (taken.__module__, taken.__qualname__) != (selector.__module__, selector.__qualname__):
        raise SpecError(f"the selector name {selector.name!r} is taken by {taken.__module__}.")
    return selector


def selectors() -> dict[str, type[Selector]]:
    """Every registered selector by name, in alphabetical order. Its files are imported on the first call."""
    package = import_module("kvfoundry.blend.select")
    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_SELECTORS.items()))


def selector(name: str) -> type[Selector]:
    """The selector of a name; SpecError with the nearest names when there is none."""
    known = selectors()
    if name not in known:
        raise SpecError(unknown_name("selector", str(name), known))
    return known[name]
