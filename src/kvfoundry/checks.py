"""Checks of parameter values: one sentence each."""

from kvfoundry.errors import SpecError


def choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """SpecError unless the value is one of the allowed words."""
    if value not in allowed:
        raise SpecError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")


def whole(name: str, value: object, *, least: int = 0) -> None:
    """SpecError unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"{name} must be a whole number of at least {least}, got {value!r}.")
