"""Variable tracking: a number is handed from variable to variable, and all that hold it are asked for."""

import random
import string
from dataclasses import dataclass

from kvfoundry.evaluate.tasks.ruler.base import Draft, Setting
from kvfoundry.evaluate.tasks.ruler.filler import in_noise
from kvfoundry.evaluate.tasks.ruler.fit import largest_fitting
from kvfoundry.evaluate.tasks.ruler.words import letters

INTRO = "In the text below, variables are set to a number or to another variable. Keep track of them.\n\n"
QUESTION = "\n\nWhich variables in the text above hold the value {value}, directly or by way of others?"
ANSWER = "\nIn the text above, {count} variables hold the value {value}:"

_EXAMPLE_TOKENS = 500  # at most, and no more than a quarter of a short prompt


@dataclass(frozen=True)
class ChainSpec:
    """So many chains of hops; all variables of the first chain, hops + 1 of them, are asked for."""

    chains: int = 1
    hops: int = 4


def _lines(names: list[str], value: int) -> list[str]:
    """The first variable gets the value, each further one the variable before it."""
    sources = [str(value), *names]
    return [f"Set {name} to {source}." for name, source in zip(names, sources, strict=False)]


@dataclass(frozen=True)
class _Chains:
    """The names of the first chain, its value, and the lines of all chains."""

    names: list[str]
    value: int
    lines: list[str]


def _draw(spec: ChainSpec, rng: random.Random, name_length: int) -> _Chains:
    """All names and values are different."""
    size = spec.hops + 1
    names = letters(rng, name_length, spec.chains * size, string.ascii_uppercase)
    values = rng.sample(range(10_000, 99_999), spec.chains)
    chains = [names[start : start + size] for start in range(0, len(names), size)]
    lines = [_lines(chain, value) for chain, value in zip(chains, values, strict=True)]
    return _Chains(chains[0], values[0], _mixed(lines, rng))


def _mixed(chains: list[list[str]], rng: random.Random) -> list[str]:
    """The lines of all chains, shuffled so that each chain keeps its order."""
    order = [number for number, chain in enumerate(chains) for _ in chain]
    rng.shuffle(order)
    waiting = [iter(chain) for chain in chains]
    return [next(waiting[number]) for number in order]


def _example(spec: ChainSpec, setting: Setting) -> str:
    """A worked example of the same form with names of three letters, its answer included."""
    chains = _draw(spec, setting.rng("example chains"), name_length=3)
    filler = in_noise(chains.lines, setting.part("example"))
    end = QUESTION.format(value=chains.value) + ANSWER.format(count=len(chains.names), value=chains.value)

    def text(size: int) -> str:
        return f"{INTRO}{filler.context(size)}{end} {' '.join(chains.names)}\n\n"

    room = min(_EXAMPLE_TOKENS, setting.length // 4)
    size = largest_fitting(lambda size: setting.count(text(size)), room, filler.smallest, max(room, filler.smallest))
    return text(filler.smallest if size is None else size)


def draft(spec: ChainSpec, setting: Setting) -> Draft:
    """An item of variable tracking: the worked example, then chains in noise."""
    chains = _draw(spec, setting.rng("chains"), name_length=5)
    return Draft(
        filler=in_noise(chains.lines, setting),
        before=_example(spec, setting) + INTRO,
        question=QUESTION.format(value=chains.value),
        answer_prefix=ANSWER.format(count=len(chains.names), value=chains.value),
        references=tuple(chains.names),
    )
