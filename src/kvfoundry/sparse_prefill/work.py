"""How much of a prompt's attention was computed, noted call by call and layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Work:
    """computed: blocks of all calls that were not dense, a scalar for each device, where they may still be on their way;
    dense: of all calls that were; causal: what dense attention computes in all of them. Nothing here waits for a device.
    """

    computed: tuple[Tensor, ...] = ()
    dense: int = 0
    causal: int = 0

    def plus(self, computed: Tensor | int, causal: int) -> Work:
        """With one call more."""
        if isinstance(computed, int):
            return Work(self.computed, self.dense + computed, self.causal + causal)
        elsewhere = tuple(total for total in self.computed if total.device != computed.device)
        for total in self.computed:
            computed = computed + total if total.device == computed.device else computed
        return Work((*elsewhere, computed), self.dense, self.causal + causal)

    @property
    def share(self) -> float | None:
        """Computed blocks over causal ones; None before the first call."""
        if not self.causal:
            return None
        return (self.dense + sum(int(blocks) for blocks in self.computed)) / self.causal
