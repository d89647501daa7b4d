"""How chunks are blended, as a spec string in the grammar of methods: `blend(ratio=0.15, select=deviation)`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from kvfoundry.blend.select.base import Selector
from kvfoundry.blend.select.deviation import Deviation
from kvfoundry.blend.select.register import selector
from kvfoundry.checks import choice, number
from kvfoundry.errors import SpecError, unknown_name
from kvfoundry.method import Call, parse_calls

_OWN = ("ratio", "select", "mask")


@dataclass(frozen=True)
class Blend:
    """ratio: share of the context's tokens that are computed again. select: which ones.

    mask: "causal" lets a recomputed token see what is in front of it; "corner" is the mask of CacheBlend's code, which
    aligns the triangle to the lower right of the chosen rows, so that a token also sees some later ones (to reproduce
    published numbers).
    """

    ratio: float = 0.15
    select: Selector = field(default_factory=Deviation)
    mask: Literal["causal", "corner"] = "causal"

    def __post_init__(self) -> None:
        number("blend: ratio", self.ratio, least=0.0, most=1.0)
        choice("blend: mask", self.mask, ("causal", "corner"))

    @classmethod
    def parse(cls, spec: str | Blend) -> Blend:
        """The blend of a spec string; parameters of the selector stand beside `ratio`, `select` and `mask`.

        Raises SpecError for bad syntax, an unknown selector or parameter (with what exists), or a value out of range.
        """
        if isinstance(spec, Blend):
            return spec
        calls = parse_calls(spec)
        if len(calls) != 1 or calls[0][0] != "blend":
            raise SpecError(f"cannot read {spec!r}: write blend(ratio=0.15, select=deviation), and nothing beside it.")
        given = calls[0][1]
        chosen = selector(given.get("select", Deviation.name))
        own = {name: value for name, value in given.items() if name in _OWN and name != "select"}
        rest = {name: value for name, value in given.items() if name not in _OWN}
        known = [item.name for item in fields(chosen)]  # type: ignore[arg-type]
        for name in rest:
            if name not in known:
                raise SpecError(f"blend with select={chosen.name}: {unknown_name('parameter', name, [*_OWN, *known])}")
        return cls(select=chosen(**rest), **own)

    @property
    def corner_from(self) -> int | None:
        """The attention layer from which queries see by the lower right corner; None where they see causally."""
        if self.mask == "causal":
            return None
        return self.select.checks[0] if self.select.checks else 0

    def __str__(self) -> str:
        """The canonical spec: parses back to an equal blend."""
        default = {item.name: item.default for item in fields(self.select)}  # type: ignore[arg-type]
        values: dict[str, Any] = {"ratio": self.ratio, "select": self.select.name}
        values |= {name: getattr(self.select, name) for name in default if getattr(self.select, name) != default[name]}
        if self.mask != "causal":
            values["mask"] = self.mask
        return str(Call("blend", tuple(values.items())))
