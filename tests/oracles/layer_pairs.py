"""Driver for recordings of merged layer pairs: the pair store is given the rows of both layers."""

import math

import torch
from torch import Tensor

import kvfoundry
from kvfoundry.codecs.minicache import merge_rows
from kvfoundry.layouts.pair_store import MiniCachePairStore

from .cases import Case
from .mapping import Claim, Unmapped, recipe_for

# Two opposite rows have no direction between them: what comes out is rounding.
_OPPOSITE = math.pi - 0.01


def replay(case: Case, claim: Claim) -> None:
    inputs = case.inputs() or {name: case.tensor(name) for name in ("current", "previous")}
    current, previous = inputs.get("current"), inputs.get("previous")
    if current is None or previous is None:
        raise Unmapped("the recording of a pair needs current and previous")
    recipe = recipe_for(case, claim, current.shape[2])
    pairs = kvfoundry.Method.parse(recipe.spec).pairs
    assert pairs is not None
    tolerance = _tolerance(case)
    merged = merge_rows(previous, current, pairs.t)
    stable = (merged.angle < _OPPOSITE)[..., None]
    for name, ours in {
        "shared_direction": merged.direction * stable,
        "current_magnitude": merged.later_magnitude[..., None],
        "previous_magnitude": merged.earlier_magnitude[..., None],
        "angle": merged.angle,
        "angular_distance": merged.angle / math.pi,
    }.items():
        wanted = case.tensor(name)
        if wanted is not None:
            wanted = wanted * stable if name == "shared_direction" else wanted
            torch.testing.assert_close(ours, wanted, **tolerance, msg=lambda m, n=name: f"{n}: {m}")
    for ending, retention in (("", pairs.retention), ("_no_retention", 0.0)):
        store = MiniCachePairStore(pairs.t, retention)
        # The rule is the same for keys and values, so the one tensor stands for both.
        store.merge_pair(0, 1, (previous, previous), (current, current))
        pair, indices = store.restore_pair(0, 1), store.retention_indices(0, 1)
        for side in ("keys", "values"):
            for half, name in (("later", f"restored_current{ending}"), ("earlier", f"restored_previous{ending}")):
                _compare(case, name, getattr(getattr(pair, half), side), stable, tolerance)
            if not ending:
                wanted = case.tensor("retained_indices")
                count = 0 if wanted is None else wanted.shape[2]
                found = getattr(indices, side)
                assert found.shape[2] == count, f"{recipe.spec}: {found.shape[2]} rows retained, recorded are {count}"
                assert wanted is None or torch.equal(found, wanted.long()), recipe.spec


def _compare(case: Case, name: str, ours: Tensor, stable: Tensor, tolerance: dict[str, float]) -> None:
    wanted = case.tensor(name)
    if wanted is not None:
        torch.testing.assert_close(ours * stable, wanted * stable, **tolerance, msg=lambda m: f"{name}: {m}")


def _tolerance(case: Case) -> dict[str, float]:
    own = case.entry.get("tolerance", {})
    return {"rtol": 0.0, "atol": float(own["atol"])} if "atol" in own else case.tolerance("tensors")
