"""Attention that a row receives while the model repeats the context (KVzip)."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvfoundry.errors import CacheStateError
from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.scores.base import Score

# Name under which `kvfoundry.reconstruction` hands over what the rows received: [batch, query_heads, tokens].
RECEIVED = "received"

Scope = Literal["model", "layer", "head"]


@dataclass(frozen=True)
class Reconstruction:
    """The second pass: `chunk` tokens of the context are repeated at a time, `overlap` tokens say where to go on.

    sinks: first rows that every softmax of the pass includes. scope: among whom rows compete for the budget: all heads
    of the model, those of a layer, or each head for itself.
    """

    chunk: int = 2000
    overlap: int = 8
    sinks: int = 4
    scope: Scope = "model"

    @property
    def reading(self) -> tuple[int, int, int]:
        """What decides the pass itself; methods that agree in it can share one."""
        return self.chunk, self.overlap, self.sinks


@dataclass(frozen=True)
class ReconstructionAttention(Score):
    """The largest weight that any query of the second pass spent on the row, then the group reduction."""

    def __call__(self, evidence: Evidence) -> Tensor:
        received = evidence.summary.get(RECEIVED)
        if received is None:
            raise CacheStateError("no reconstruction has been run; call kvfoundry.compress_by_reconstruction.")
        # Rows are looked up by token index: a contest by blocks shows only some of them.
        positions = evidence.rows.head_positions.long().clamp(min=0)
        return evidence.reduced(received.gather(2, positions.repeat_interleave(evidence.groups, dim=1)))
