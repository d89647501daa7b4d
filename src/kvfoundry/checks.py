"""Checks of parameter values: one sentence each."""

import math

from kvfoundry.errors import SpecError


def choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """SpecError unless the value is one of the allowed words."""
    if value not in allowed:
        raise SpecError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")


def whole(name: str, value: object, *, least: int = 0) -> None:
    """SpecError unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"{name} must be a whole number of at least {least}, got {value!r}.")


def number(name: str, value: object, *, least: float = -math.inf, most: float = math.inf) -> None:
    """SpecError unless the value is a finite number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise SpecError(f"{name} must be a finite number, got {value!r}.")
    if not least <= value <= most:
        bounds = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise SpecError(f"{name} must be {bounds}, got {value!r}.")


def flag(name: str, value: object) -> None:
    """SpecError unless the value is True or False."""
    if not isinstance(value, bool):
        raise SpecError(f"{name} must be True or False, got {value!r}.")
