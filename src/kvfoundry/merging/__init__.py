"""What becomes of dropped rows: pure functions that fold them into rows that stay."""

from kvfoundry.merging.base import Disposal

__all__ = ["Disposal"]
