"""Colours and marks: a score's place on one light-to-dark ramp, and the colour and shape that tell a recipe apart.

The ramp stays ordered for colour-blind readers and in grey print; recipes differ in shape as well as in colour.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvfoundry.evaluate.recipes import FULL

RAMP = ((0.0, (247, 251, 255)), (0.35, (158, 202, 225)), (0.7, (49, 130, 189)), (1.0, (8, 48, 107)))
INK = "#1c2733"

# Okabe and Ito's palette, darkened where it is pale on white.
_COLOURS = ("#0072b2", "#c84c00", "#00785a", "#b0528c", "#a67600", "#3b8fc4", "#6a3d9a", "#7a5230")
_SHAPES = ("circle", "square", "triangle", "diamond", "down", "cross")


def ramp_colour(value: float) -> tuple[str, str]:
    """Fill and text colour of a score in [0, 1]."""
    value = min(max(value, 0.0), 1.0)
    for (low, first), (high, second) in pairwise(RAMP):
        if value <= high:
            share = (value - low) / (high - low)
            red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
            break
    return f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if value > 0.55 else INK


@dataclass(frozen=True)
class Mark:
    """How one recipe is drawn."""

    colour: str
    shape: str

    def svg(self, x: float, y: float, size: float = 5.0, *, filled: bool = True, title: str = "") -> str:
        """The mark around (x, y); `title`, already escaped, is what a pointer shows."""
        fill = self.colour if filled else "#ffffff"
        look = f'fill="{fill}" stroke="{self.colour}" stroke-width="1.6"'
        inside = f"<title>{title}</title>" if title else ""
        if self.shape == "circle":
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" {look}>{inside}</circle>'
        points = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in _OUTLINES[self.shape])
        return f'<polygon points="{points}" {look}>{inside}</polygon>'


_OUTLINES = {
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "triangle": ((0, -1.2), (1.1, 0.8), (-1.1, 0.8)),
    "diamond": ((0, -1.3), (1.1, 0), (0, 1.3), (-1.1, 0)),
    "down": ((0, 1.2), (1.1, -0.8), (-1.1, -0.8)),
    "cross": (
        (-0.4, -1.2), (0.4, -1.2), (0.4, -0.4), (1.2, -0.4), (1.2, 0.4), (0.4, 0.4),
        (0.4, 1.2), (-0.4, 1.2), (-0.4, 0.4), (-1.2, 0.4), (-1.2, -0.4), (-0.4, -0.4),
    ),
}  # fmt: skip


def marks_of(families: Sequence[str]) -> dict[str, Mark]:
    """One mark per recipe, the same all over the page; the full cache is always the dark one."""
    others = [family for family in families if family != FULL]
    marks = {
        family: Mark(_COLOURS[number % len(_COLOURS)], _SHAPES[number % len(_SHAPES)])
        for number, family in enumerate(others)
    }
    return {family: marks[family] if family != FULL else Mark(INK, "square") for family in families}
