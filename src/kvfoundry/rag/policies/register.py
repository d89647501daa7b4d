"""The register of policies: one decorated class per name, found by scanning `kvfoundry.rag.policies`."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from kvfoundry.errors import SpecError, unknown_name
from kvfoundry.rag.policies.base import Policy

_POLICIES: dict[str, type[Policy]] = {}


def register(own: type[Policy]) -> type[Policy]:
    """Enter a policy under its `name`; SpecError when another one has it."""
    taken = _POLICIES.setdefault(own.name, own)
    if (taken.__module__, taken.__qualname__) != (own.__module__, own.__qualname__):
        raise SpecError(f"the policy name {own.name!r} is taken by {taken.__module__}.")
    return own


def policies() -> dict[str, type[Policy]]:
    """Every registered policy by name, in alphabetical order. Its files are imported on the first call."""
    package = import_module("kvfoundry.rag.policies")
    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_POLICIES.items()))


def policy(spec: str) -> Policy:
    """The policy of a spec such as `bandit(bonus=0.5)`.

    SpecError for a policy that does not exist (with the nearest names), or a parameter that it does not take.
    """
    from dataclasses import fields

    from kvfoundry.method import parse_calls

    calls = parse_calls(spec)
    if len(calls) != 1:
        raise SpecError(f"cannot read the policy {spec!r}: write one name, with parameters in parentheses.")
    name, given = calls[0]
    known = policies()
    if name not in known:
        raise SpecError(unknown_name("policy", name, known))
    takes = [item.name for item in fields(known[name])]  # type: ignore[arg-type]
    for each in given:
        if each not in takes:
            raise SpecError(f"{name}: {unknown_name('parameter', each, takes) if takes else 'takes no parameter.'}")
    return known[name](**given)
