"""The configuration of `kvfoundry rag run`: a YAML file, then KVFOUNDRY_RAG_* variables, then flags.

There is no second list of options: a file has a section per step with the options that the step's command declares, and
what several steps have in common may stand once, above the sections.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from kvfoundry.cli.rag.steps import REQUIRED, Option, Step
from kvfoundry.errors import DataError, unknown_name

PREFIX = "KVFOUNDRY_RAG_"

# A folder for all results; each step writes into its own folder below.
OUT = "out"


@dataclass
class Settings:
    """What was asked for, already checked. common: for every step that has the option; own: of one step."""

    steps: Sequence[Step]
    common: dict[str, Any] = field(default_factory=dict)
    own: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def common_options(self) -> dict[str, Option]:
        """Options that at least two steps have, the folder among them."""
        found: dict[str, list[Option]] = {}
        for step in self.steps:
            for option in step.options.values():
                found.setdefault(option.name, []).append(option)
        return {name: options[0] for name, options in found.items() if len(options) > 1}

    def set(self, where: str | None, name: str, value: Any, source: str) -> None:
        """Take over one value. where: a step's name, or None for all. source: how it is named in an error.

        Raises:
            DataError: no such step or option, or a value of another kind.
        """
        if where is None:
            options, target, label = self.common_options, self.common, name
        else:
            by_name = {step.name: step for step in self.steps}
            if where not in by_name:
                raise DataError(f"{source}: {unknown_name('step', where, by_name)}")
            options, target = by_name[where].options, self.own.setdefault(where, {})
            label = f"{where}.{name}"
        if name not in options:
            raise DataError(f"{source}: {unknown_name('setting', name, options)}")
        target[name] = _checked(options[name], value, f"{source}: {label}")

    def of(self, step: Step, handed: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of one step; handed: what steps before it have made, unless the user named another."""
        given = {name: value for name, value in handed.items() if name in step.options}
        given |= {name: value for name, value in self.common.items() if name in step.options}
        if OUT in self.common:
            given |= _moved(step, self.common[OUT])
        given |= step.always
        given |= self.own.get(step.name, {})
        return {option.name: given.get(option.name, option.default) for option in step.options.values()}


def _moved(step: Step, out: Path) -> dict[str, Path]:
    """A step's folder, and what lies in it by default, in another folder of results."""
    home = step.options[OUT].default
    return {
        option.name: out / home.name / option.default.relative_to(home)
        for option in step.options.values()
        if isinstance(option.default, Path) and option.default.is_relative_to(home)
    }


def read_config(settings: Settings, path: Path) -> None:
    """Take over a YAML file.

    Raises:
        DataError: it cannot be read, is no YAML, or sets what does not exist.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"config file {path} cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        told = " ".join(str(error).split())
        raise DataError(f"config file {path} is not YAML: {told}.") from error
    if content is None:
        return
    if not isinstance(content, dict):
        raise DataError(f"config file {path} holds no settings; see `kvfoundry rag run --print-config`.")
    names = {step.name for step in settings.steps}
    for key, value in content.items():
        if key not in names:
            if isinstance(value, dict):
                raise DataError(f"{path}: {unknown_name('step', str(key), names)}")
            settings.set(None, str(key), value, str(path))
        elif value is not None and not isinstance(value, dict):
            raise DataError(f"{path}: {key} is a step; its settings stand below it, indented.")
        else:
            for name, own in (value or {}).items():
                settings.set(str(key), str(name), own, str(path))


def read_environment(settings: Settings, environment: Mapping[str, str]) -> None:
    """Take over KVFOUNDRY_RAG_<OPTION> and KVFOUNDRY_RAG_<STEP>_<OPTION>.

    Raises:
        DataError: a variable that begins so and names nothing, or a value of another kind.
    """
    names = {step.name for step in settings.steps}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        word = variable.removeprefix(PREFIX).lower()
        step, _, rest = word.partition("_")
        if step in names and rest:
            settings.set(step, rest, text, variable)
        else:
            settings.set(None, word, text, variable)


def read_assignments(settings: Settings, assignments: Iterable[str]) -> None:
    """Take over `step.option=value` or `option=value`.

    Raises:
        DataError: not of that form, or it names nothing, or a value of another kind.
    """
    for text in assignments:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise DataError(f"--set {text!r} is not of the form step.option=value, such as decode.max_new_tokens=32.")
        step, dot, rest = name.partition(".")
        settings.set(step if dot else None, rest if dot else name, value, f"--set {text}")


def template(settings: Settings) -> str:
    """A YAML file with every setting, its line of help and its default, commented out where nothing is set."""
    lines = ["# kvfoundry rag run --config FILE. A value in a step's section wins over one for all steps.", ""]
    common = settings.common_options
    for option in common.values():
        lines += _told(option, settings.common, "")
    for step in settings.steps:
        own = settings.own.get(step.name, {})
        lines += ["", f"{step.name}:"]
        for option in step.options.values():
            if option.name not in common or option.name in own:
                lines += _told(option, own, "  ")
    return "\n".join(lines) + "\n"


def _told(option: Option, given: Mapping[str, Any], indent: str) -> list[str]:
    mark, value = ("", given[option.name]) if option.name in given else ("# ", option.default)
    shown = "made by a step before" if value is REQUIRED else _yaml(value)
    return [f"{indent}# {option.text}", f"{indent}{mark}{option.name}: {shown}"]


def _yaml(value: Any) -> str:
    import yaml

    plain = str(value) if isinstance(value, Path) else value
    plain = [str(one) if isinstance(one, Path) else one for one in plain] if isinstance(plain, list | tuple) else plain
    return str(yaml.safe_dump(plain, default_flow_style=True, width=1000)).removesuffix("\n").removesuffix("\n...")


def _checked(option: Option, value: Any, label: str) -> Any:
    """The value as the command would get it from its own flag."""
    from pydantic import TypeAdapter, ValidationError

    if isinstance(value, str) and _takes_none(option.hint) and value.lower() in ("", "none", "null"):
        return None
    if isinstance(value, str) and _is_list(option.hint):
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return TypeAdapter(option.hint).validate_python(value)
    except ValidationError as error:
        told = "; ".join(found["msg"][:1].lower() + found["msg"][1:] for found in error.errors()[:1])
        raise DataError(f"{label}={value!r}: {told}.") from error


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _takes_none(hint: Any) -> bool:
    return type(None) in _alternatives(hint)


def _is_list(hint: Any) -> bool:
    return any(get_origin(one) in (list, tuple) for one in _alternatives(hint))
