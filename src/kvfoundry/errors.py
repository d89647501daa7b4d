"""The errors that kvfoundry raises on purpose: one sentence with the cause and the way out.

The command line prints such an error as one line and exits with 2; anything else is a defect of ours.
"""

import difflib
from collections.abc import Iterable


class KVFoundryError(ValueError):
    """Base of every deliberate refusal."""


class SpecError(KVFoundryError):
    """A method spec, a parameter or a budget that cannot be honoured."""


class UnsupportedModelError(KVFoundryError):
    """A model family that the cache cannot serve exactly."""


class CacheStateError(KVFoundryError):
    """A request that the present state of a cache cannot answer, for example a crop of rows that are gone."""


class ModelLoadError(KVFoundryError):
    """A model that cannot be found, fetched, verified or read."""


class DataError(KVFoundryError):
    """An input file or an output folder that cannot be used."""


class StoreError(KVFoundryError):
    """A chunk store that cannot be opened as asked, or a request that it cannot serve."""


class MissingExtraError(KVFoundryError):
    """An optional dependency that is not installed; the message names the extra."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a misspelt name: what exists, and the nearest of it."""
    choices = sorted(known)
    nearest = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown {kind} {name!r}{hint} Known: {', '.join(choices)}."
