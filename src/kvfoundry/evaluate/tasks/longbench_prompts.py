"""The prompts of LongBench: our own wording, or a file with the published one.

Both have the published form: one JSON object from data set to a template with the fields {context} and {input}.
"""

import hashlib
import json
import string
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvfoundry.errors import DataError, unknown_name
from kvfoundry.evaluate.tasks.longbench_sets import DATA_SETS, DataSet
from kvfoundry.evaluate.tasks.records import read_json

# Goes into every record. A change of the wording makes a new version: scores under two versions do not compare.
OWN_PROMPTS = "kvfoundry-1"


@dataclass(frozen=True)
class Prompts:
    """Templates by data set; `source` is the version of our own or the name of the user's file."""

    source: str
    templates: dict[str, str]

    def fill(self, data_set: DataSet, context: str, given: str) -> str:
        """The text of one prompt."""
        return self.templates[data_set.name].format(context=context, input=given)

    def after_context(self, data_set: DataSet, given: str) -> str:
        """What the prompt says behind the context: the question."""
        _, _, tail = self.templates[data_set.name].rpartition("{context}")
        return tail.format(input=given)

    def digest(self, data_set: DataSet) -> str:
        """SHA-256 of the template."""
        return hashlib.sha256(self.templates[data_set.name].encode()).hexdigest()

    def is_published(self, data_set: DataSet) -> bool:
        """Whether the template is the published one to the letter."""
        return self.digest(data_set) == data_set.published

    def note(self, data_set: DataSet) -> str:
        """What a reader of the scores has to know about the wording."""
        if self.is_published(data_set):
            return f"prompts of {self.source}: the published wording"
        return f"prompts of {self.source}: not the published wording, so scores do not compare with published ones"


def load_prompts(path: Path | None, data_sets: Sequence[DataSet]) -> Prompts:
    """Our own prompts, or those of a file, checked for the data sets that will be asked.

    Raises:
        DataError: a file that cannot be read, an unknown data set or field in it, or no usable template for one of
            `data_sets`.
    """
    if path is None:
        packaged = files("kvfoundry.evaluate").joinpath("data/longbench_prompts.json")
        return Prompts(OWN_PROMPTS, json.loads(packaged.read_text(encoding="utf-8")))
    label = f"prompts file {path}"
    templates = read_json(path)
    if not isinstance(templates, dict) or not templates:
        raise DataError(f"{label} holds no prompts; give an object of data set: template.")
    for name, template in templates.items():
        if name not in DATA_SETS:
            raise DataError(f"{label}: {unknown_name('LongBench data set', name, DATA_SETS)}")
        _check_template(label, DATA_SETS[name], template)
    for data_set in data_sets:
        if data_set.name not in templates:
            raise DataError(f"{label} has no prompt for {data_set.name}; add one, or leave it out of --datasets.")
    return Prompts(path.name, templates)


def _check_template(label: str, data_set: DataSet, template: Any) -> None:
    if not isinstance(template, str):
        raise DataError(f"{label}: the prompt of {data_set.name} is not a string.")
    needed = {"context", "input"} if data_set.takes_input else {"context"}
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise DataError(
            f"{label}: the prompt of {data_set.name} cannot be filled ({error}); write {{{{ and }}}} for plain braces."
        ) from error
    fields = [name for _, name, _, _ in parts if name is not None]
    for name in fields:
        if name not in ("context", "input"):
            raise DataError(
                f"{label}: the prompt of {data_set.name} has the unknown field {{{name}}}; "
                "the fields are {context} and {input}."
            )
    if any(spec or conversion for _, _, spec, conversion in parts):
        raise DataError(
            f"{label}: the prompt of {data_set.name} formats a field; write {{context}} or {{input}} alone."
        )
    for name in sorted(needed - set(fields)):
        raise DataError(
            f"{label}: the prompt of {data_set.name} does not use {{{name}}}, and so could not be answered."
        )
    if fields.count("context") > 1:
        raise DataError(f"{label}: the prompt of {data_set.name} uses {{context}} more than once.")
