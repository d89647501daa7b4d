"""Options that several commands share, declared once: each field of a dataclass becomes an option of each command."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

Command = Callable[..., None]


def sharing(options: type[Any], **defaults: Any) -> Callable[[Command], Command]:
    """Put the fields of a dataclass behind the command's own parameters; it receives them as `options`.

    options: a dataclass whose fields are annotated for typer. defaults: of single fields, for this command.
    """
    hints = get_type_hints(options, include_extras=True)
    given = {field.name: defaults.get(field.name, field.default) for field in fields(options)}

    def decorated(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [name for name in signature.parameters if name != "options"]

        @functools.wraps(command)
        def wrapped(**values: Any) -> None:
            command(**{name: values.pop(name) for name in own}, options=options(**values))

        parameters = [signature.parameters[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in own] + [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
            for name, default in given.items()
        ]
        wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapped

    return decorated
