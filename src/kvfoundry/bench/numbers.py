"""Figures as people read them."""

from __future__ import annotations


def short(number: float | None) -> str:
    """Three digits, two of a fraction, or all of them before the point."""
    if number is None:
        return "-"
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}" if number >= 1 else f"{number:.2g}"
