"""How much of a prompt's attention was computed, noted call by call and layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Work:
    """What all calls together computed, in blocks; nothing here waits for a device.

    computed: of calls that were not dense, a scalar for each device, where it may still be on its way; dense: of calls
    that were; causal: what dense attention computes in all of them.
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
