"""Spec strings as results hold them: the recipe without its budget, and the budget. No method is looked up."""

import re

_BUDGET = re.compile(r"\bbudget=([0-9.e+-]+)(?:, )?")

# The spec of the baseline that every other method is measured against.
FULL = "fullkv"


def split_budget(spec: str) -> tuple[str, int | float | None]:
    """ "snapkv(budget=64, window=8)" -> ("snapkv(window=8)", 64): rows are int, shares float.

    A recipe without a budget, or with several of them, stands for itself: (spec, None).
    """
    found = _BUDGET.findall(spec)
    if len(found) != 1:
        return spec, None
    try:
        budget: int | float = int(found[0])
    except ValueError:
        budget = float(found[0])
    family = _BUDGET.sub("", spec)
    return family.replace(", )", ")").replace("()", ""), budget
