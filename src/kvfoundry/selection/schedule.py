"""When a method acts."""

from dataclasses import dataclass
from typing import Literal

from kvfoundry.errors import SpecError


@dataclass(frozen=True)
class Schedule:
    """prefill: "chunk" evicts after every piece of the prompt, "end" once after the whole prompt, "never" not at all.

    every: in decode, evict down to the budget after every so many tokens; None leaves decoded rows alone.
    cap: rows per head to keep in decode when that differs from the prompt's budget.
    A share budget is resolved on the prompt and stays fixed in decode.
    """

    prefill: Literal["chunk", "end", "never"] = "chunk"
    every: int | None = None
    cap: int | None = None

    def __post_init__(self) -> None:
        if self.prefill not in ("chunk", "end", "never"):
            raise SpecError(f"schedule: prefill must be 'chunk', 'end' or 'never', got {self.prefill!r}.")
        for name, value in (("every", self.every), ("cap", self.cap)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SpecError(f"schedule: {name} must be a whole number of at least 1, got {value!r}.")
        if self.cap is not None and self.every is None:
            raise SpecError("schedule: cap needs every=N, the number of decoded tokens between two evictions.")
