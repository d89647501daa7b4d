"""The steps of the pipeline in their order, and their options as a configuration file may set them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer.models import OptionInfo

REQUIRED = inspect.Parameter.empty

# What the pipeline decides for all steps at once.
_NOT_OF_A_STEP = frozenset({"as_json"})


@dataclass(frozen=True)
class Option:
    """One option of a step. hint: its type without typer's part; text: its line of help.

    default: `REQUIRED` where the command has none, because a step before makes it.
    """

    name: str
    hint: Any
    default: Any
    text: str


@dataclass(frozen=True)
class Step:
    """A command `kvfoundry rag NAME`, called with its options by name.

    It returns what later steps need under the names of their options, for example {"retrieval": path}. always: options
    that a pipeline sets otherwise than the command alone.
    """

    name: str
    command: Callable[..., Mapping[str, Any] | None]
    always: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def options(self) -> dict[str, Option]:
        """By name, as the command declares them."""
        return {option.name: option for option in _declared(self.command) if option.name not in _NOT_OF_A_STEP}


def _declared(command: Callable[..., Any]) -> Iterator[Option]:
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        hint, text = hints[name], ""
        if get_origin(hint) is Annotated:
            hint, *extras = get_args(hint)
            text = next((extra.help or "" for extra in extras if isinstance(extra, OptionInfo)), "")
        yield Option(name, hint, parameter.default, text)


def steps() -> tuple[Step, ...]:
    """All steps, first to last."""
    from kvfoundry.cli.rag.build import build
    from kvfoundry.cli.rag.decode import decode
    from kvfoundry.cli.rag.retrieve import retrieve

    return Step("retrieve", retrieve), Step("build", build), Step("decode", decode, {"resume": True})
