"""Which methods a comparison runs: specs crossed with budgets."""

from collections.abc import Iterable, Sequence

from kvfoundry.errors import KVFoundryError
from kvfoundry.method import Method


def expand_arms(methods: Iterable[str | Method], budgets: Sequence[int | float] = ()) -> list[Method]:
    """Methods crossed with budgets: a method that takes no budget runs once, and no arm runs twice.

    Raises:
        SpecError: an unknown method or parameter, an impossible budget.
    """
    arms: dict[str, Method] = {}
    for spec in methods:
        for arm in [Method.parse(spec, budget) for budget in budgets] or [Method.parse(spec)]:
            arms.setdefault(str(arm), arm)
    if not arms:
        raise KVFoundryError("no method given; name at least one with --method.")
    return list(arms.values())
