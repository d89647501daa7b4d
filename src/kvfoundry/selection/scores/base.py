"""The contract of a score."""

from abc import ABC, abstractmethod

from torch import Tensor

from kvfoundry.layouts.base import Columns
from kvfoundry.selection.evidence import Evidence, Summary


class Score(ABC):
    """Ranks the rows of one layer. Scores are frozen dataclasses: no state, one object serves every layer and call."""

    @property
    def window(self) -> int:
        """How many of the last queries the score needs."""
        return 0

    @property
    def accumulates(self) -> bool:
        """True when `observe` must see every call, not only those after which rows are evicted."""
        return False

    @property
    def needs_every_query(self) -> bool:
        """True when `observe` takes the rows of a call for its tokens', so that none of them may come without query."""
        return False

    @property
    def sums_columns(self) -> bool:
        """True when it asks for `evidence.column_sums` of whole prompts: attention then keeps what that can use."""
        return False

    @property
    def needs_rope(self) -> bool:
        """True when the score rotates keys or queries itself: `evidence.rope` is then the layer's embedding."""
        return False

    def observe(self, evidence: Evidence) -> Columns:
        """Statistics to store with the rows after a call ([batch, heads, rows, ...]); read back from `rows.columns`."""
        return {}

    def summary(self, evidence: Evidence, earlier: Summary) -> Summary:
        """Statistics of the sequence to keep from call to call (name -> [batch, ...]), when the score `accumulates`.

        earlier: what the previous call returned, empty at the first. Read back from `evidence.summary`.
        """
        return {}

    @abstractmethod
    def __call__(self, evidence: Evidence) -> Tensor:
        """Scores [batch, heads, rows] in float32, for the heads that are stored. Higher stays."""
