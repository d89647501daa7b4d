"""From the calls of a spec to a Method: defaults filled in, values checked, axes combined, clashes refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

from kvfoundry.codecs.base import KVCodec
from kvfoundry.errors import SpecError, unknown_name
from kvfoundry.method import Call, Method
from kvfoundry.registry import REQUIRED, Kind, MethodInfo, entry
from kvfoundry.selection.budgets import UniformBudget

Kinds: tuple[Kind, ...] = get_args(Kind)

# Axes that a method only suggests: a piece of that name may refine them.
_REFINABLE = ("protect", "schedule", "granularity", "group")


def build(calls: Iterable[tuple[str, dict[str, Any]]]) -> Method:
    """Combine named pieces into one method. Raises SpecError as `Method.parse` does."""
    entered = [(entry(name), arguments) for name, arguments in calls]
    completed = [_complete(info, arguments) for info, arguments in entered]
    if not any(info.kind == "method" for info, _ in entered):
        names = "+".join(info.name for info, _ in entered)
        raise SpecError(f"{names} only refines a method; add one, for example snapkv(budget=256)+{names}.")
    given = [info.name for info, _ in entered]
    for name in given:
        if given.count(name) > 1:
            raise SpecError(f"{name} is given twice in one recipe.")
    # Methods first, so that refinements find something to refine whatever the order in the spec.
    order = sorted(range(len(entered)), key=lambda i: entered[i][0].kind != "method")
    axes: dict[str, Any] = {}
    claimed_by: dict[str, str] = {}
    idle: list[str] = []
    for i in order:
        info, call = entered[i][0], completed[i]
        piece = info.build(**dict(call.arguments))
        if info.kind == "method" and not piece.claimed():
            idle.append(info.name)
        for axis in piece.claimed():
            value = getattr(piece, axis)
            refines = info.kind == "piece" and axis in _REFINABLE
            if axis in claimed_by and not refines:
                raise SpecError(f"{claimed_by[axis]} and {info.name} both set {axis}; use one of them.")
            # Protection adds up: refining the sinks of a method must not unprotect its window.
            axes[axis] = axes[axis] | value if axis == "protect" and axis in axes else value
            claimed_by[axis] = info.name
    _settle_layers(axes, claimed_by)
    _settle_rotation(axes)
    method = Method(calls=tuple(completed), **axes)
    if idle and method.evicts:
        raise SpecError(f"{idle[0]} keeps every row, but {claimed_by['budget']} drops some; use one of them.")
    _check_budget(method)
    _check_schedule(method)
    _check_pairs(method)
    _check_parking(method)
    _check_codec(method)
    _check_prefill(method, claimed_by)
    return method if method.budget is None else method.replace(budget=method.budget.holding(method.protect))


def _settle_layers(axes: dict[str, Any], claimed_by: dict[str, str]) -> None:
    """A spread over the layers takes the place of the uniform budget that it refines."""
    layers, budget = axes.pop("layers", None), axes.get("budget")
    if layers is None or budget is None:
        return
    if not isinstance(budget, UniformBudget):
        raise SpecError(
            f"{claimed_by['budget']} and {claimed_by['layers']} both share the budget among the layers; use one."
        )
    axes["budget"] = layers.over(budget.amount)


def _settle_rotation(axes: dict[str, Any]) -> None:
    """A rotation is part of the codec that it serves."""
    rotation, codec = axes.pop("rotation", None), axes.get("codec")
    if rotation is None:
        return
    if codec is None:
        raise SpecError("rotate turns keys before they are stored as codes; add a codec, for example rotate()+int4().")
    if not isinstance(codec, KVCodec):
        raise SpecError("rotate serves codecs that round keys; channels of turned keys mean nothing to think.")
    if codec.keys.needs_rope:
        raise SpecError("rotate cannot turn keys that a codec takes back in front of the RoPE; leave rotate out.")
    axes["codec"] = replace(codec, rotation=rotation)


def budgeted(calls: list[tuple[str, dict[str, Any]]], budget: int | float) -> list[tuple[str, dict[str, Any]]]:
    """The calls with this budget where it belongs: in pieces that store within one, else in those that read within one.

    Calls without a budget parameter stay as they are.
    """
    taking = [name for name, _ in calls if "budget" in entry(name).parameters]
    chosen = [name for name in taking if stores_within(name)] or taking
    return [(name, arguments | ({"budget": budget} if name in chosen else {})) for name, arguments in calls]


def stores_within(name: str) -> bool:
    """Whether the budget of this registered name bounds what is stored, not what is read."""
    return "budget" in entry(name).axes


def _check_budget(method: Method) -> None:
    if method.read is not None and method.unread_distance is not None:
        raise SpecError(f"{method}: leaving='skip' hides single rows, which reading by pages cannot; use 'keep'.")
    if method.budget is None:
        names = {
            kind: [call.name for call in method.calls if (info := entry(call.name)).kind == kind and not _codes(info)]
            for kind in Kinds
        }
        if names["piece"] and not method.evicts:
            refining, keeping = " and ".join(names["piece"]), " and ".join(names["method"])
            raise SpecError(f"{keeping} drops no rows, so {refining} has nothing to act on.")
        return
    protect = method.protect
    for amount in (method.budget.amount, method.schedule.cap):
        if not isinstance(amount, int) or amount >= protect.sinks + protect.recent:
            continue
        raise SpecError(
            f"{method}: a budget of {amount} rows cannot hold the rows that are always kept "
            f"({protect.sinks} first and {protect.recent} newest tokens); raise the budget or protect fewer."
        )


def _check_pairs(method: Method) -> None:
    """Layers that share their rows must hold the same tokens."""
    if method.pairs is None:
        return
    if method.evicts:
        raise SpecError(
            f"{method}: minicache merges the rows of two layers, so both must hold the same tokens, but the layers "
            "choose for themselves which rows they drop; use minicache alone."
        )
    if method.read is not None:
        raise SpecError(f"{method}: merged rows of two layers are not read by pages; use minicache alone.")


def _check_parking(method: Method) -> None:
    """Parked rows come back beside those that stayed, so these must still be what they were."""
    if not method.parks:
        return
    if method.codec is not None:
        raise SpecError(
            f"{method}: park brings rows back as they were, but a codec rounds those that stay; use one of them."
        )
    if method.slot_positions:
        raise SpecError(f"{method}: slot positions move stored keys, so parked rows do not fit; use 'original'.")


def _codes(info: MethodInfo) -> bool:
    return info.kind == "piece" and set(info.axes) <= {"codec", "rotation"}


def _check_codec(method: Method) -> None:
    if method.codec is None:
        return
    if method.pairs is not None:
        raise SpecError(f"{method}: minicache and a codec both set how rows are stored; use one of them.")
    if method.read is not None and not method.codec.readable_by_pages:
        raise SpecError(f"{method}: keys without some of their channels are not read by pages; use one of them.")
    if method.slot_positions:
        raise SpecError(f"{method}: slot positions exchange stored keys, which codes do not allow; use 'original'.")
    if method.dispose is not None and method.schedule.every is not None:
        raise SpecError(
            f"{method}: merging in decode changes rows that are stored as codes; merge in the prompt alone, with "
            "+schedule(prefill='end')."
        )


def _check_prefill(method: Method, claimed_by: dict[str, str]) -> None:
    """Sums of attention over all queries are those of dense attention, which a sparse prompt does not compute."""
    if method.prefill is not None and method.score is not None and method.score.sums_columns:
        raise SpecError(
            f"{method}: {claimed_by['score']} adds up the attention of every query of the prompt, and "
            f"{claimed_by['prefill']} does not compute all of it; use a score of the last queries, such as snapkv, or "
            "one of them alone."
        )


def _check_schedule(method: Method) -> None:
    if method.reconstructs is not None and (method.schedule.prefill != "never" or method.schedule.every is not None):
        raise SpecError(f"{method}: a reconstructing method acts once, after the whole prompt; it takes no schedule.")


def _complete(info: MethodInfo, arguments: dict[str, Any]) -> Call:
    for name in arguments:
        if name not in info.parameters:
            raise SpecError(f"{info.name}: " + unknown_name("parameter", name, info.parameters))
    missing = [name for name, default in info.parameters.items() if default is REQUIRED and name not in arguments]
    if missing:
        example = ", ".join(f"{name}=256" if name == "budget" else f"{name}=..." for name in missing)
        raise SpecError(f"{info.name}: {' and '.join(missing)} must be given, for example {info.name}({example}).")
    filled = tuple((name, arguments.get(name, default)) for name, default in info.parameters.items())
    defaults = tuple((name, default) for name, default in info.parameters.items() if default is not REQUIRED)
    return Call(info.name, filled, defaults)
