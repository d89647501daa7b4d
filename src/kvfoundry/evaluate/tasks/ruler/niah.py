"""One or several facts in a long text: the eight needle tasks of RULER."""

import random
from dataclasses import dataclass
from typing import Literal

from kvfoundry.evaluate.tasks.ruler.base import Draft, Filler, Setting
from kvfoundry.evaluate.tasks.ruler.filler import Essay, in_essay, in_lines, in_noise
from kvfoundry.evaluate.tasks.ruler.words import distinct

NEEDLE = "The {noun} filed under {key} is {value}."
_A = {"number": "a number", "identifier": "an identifier"}


@dataclass(frozen=True)
class NeedleSpec:
    """What is hidden where.

    Attributes:
        haystack: "noise" (the same sentences over and over), "essay", or "needles" (lines like the one asked for).
        keys, values: kinds of `words.DRAWS`; the kind of the values is also their noun in the text.
        num_keys, values_per_key: the facts that are hidden. queries: how many keys are asked for.
    """

    haystack: Literal["noise", "essay", "needles"]
    keys: Literal["pair", "identifier"] = "pair"
    values: Literal["number", "identifier"] = "number"
    num_keys: int = 1
    values_per_key: int = 1
    queries: int = 1

    def needle(self, key: str, value: str) -> str:
        return NEEDLE.format(noun=self.values, key=key, value=value)


class _OtherNeedles:
    """Lines with keys and values of their own, as many as are asked for."""

    def __init__(self, spec: NeedleSpec, rng: random.Random, taken: set[str]) -> None:
        self._spec, self._rng, self._taken = spec, rng, taken
        self._made: list[str] = []

    def lines(self, count: int) -> list[str]:
        while len(self._made) < count:
            key, value = (distinct(self._rng, kind, self._taken) for kind in (self._spec.keys, self._spec.values))
            self._made.append(self._spec.needle(key, value))
        return self._made[:count]


def draft(spec: NeedleSpec, setting: Setting, essay: Essay) -> Draft:
    """An item of a needle task; `essay` is the haystack of the specs that ask for one."""
    rng = setting.rng("needles")
    taken: set[str] = set()

    def fresh(kind: str) -> str:
        while True:
            found = distinct(rng, kind, taken)
            if spec.haystack != "essay" or not essay.holds(found, setting.length):
                return found

    facts = {fresh(spec.keys): [fresh(spec.values) for _ in range(spec.values_per_key)] for _ in range(spec.num_keys)}
    needles = [spec.needle(key, value) for key, values in facts.items() for value in values]
    rng.shuffle(needles)
    asked = rng.sample(list(facts), spec.queries)
    references = tuple(value for key in asked for value in facts[key])
    names = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])} and {asked[-1]}"
    if len(references) == 1:
        subject, verb = f"{spec.values} filed under {names}", "is"
        before = f"In the text below, {_A[spec.values]} is filed under a name. You will be asked for it.\n\n"
    else:
        subject, verb = f"{spec.values}s filed under {names}", "are"
        before = f"In the text below, {spec.values}s are filed under names. You will be asked for them.\n\n"
    return Draft(
        filler=_filler(spec, needles, setting, essay, taken),
        before=before,
        question=f"\n\nWhat {verb} the {subject} in the text above?",
        answer_prefix=f"\nThe {subject} in the text {verb}",
        references=references,
    )


def _filler(spec: NeedleSpec, needles: list[str], setting: Setting, essay: Essay, taken: set[str]) -> Filler:
    if spec.haystack == "essay":
        return in_essay(needles, essay, setting)
    if spec.haystack == "noise":
        return in_noise(needles, setting)
    return in_lines(needles, _OtherNeedles(spec, setting.rng("other needles"), taken).lines, setting)
