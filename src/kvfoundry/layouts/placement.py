"""Where the rows of a layer live between two calls: the placement axis of a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from kvfoundry.layouts.base import Layout
from kvfoundry.layouts.coded import CodedRows
from kvfoundry.layouts.ring import Rings
from kvfoundry.layouts.streamed import StreamedRows
from kvfoundry.layouts.streamed_codes import StreamedCodes


class Placement(ABC):
    """Moves the rows of a layer to where they wait for the next call. Frozen, without state."""

    @abstractmethod
    def placed(self, rows: Layout, rings: Rings, place: int, expected: int) -> Layout:
        """The rows after a call. place: the layer; expected: rows of a head that there will be, 0 where unknown."""


@dataclass(frozen=True)
class HeadStreaming(Placement):
    """All rows in host memory, streamed to the device by groups of `group` heads."""

    group: int = 1

    def placed(self, rows: Layout, rings: Rings, place: int, expected: int) -> Layout:
        if isinstance(rows, StreamedRows):
            return rows.settled(rings, expected)
        if isinstance(rows, StreamedCodes):
            return rows.through(rings)
        if not int(rows.lengths.max()):
            return rows
        if isinstance(rows, CodedRows):
            return StreamedCodes.of(rows, self.group, rings, place, expected)
        return StreamedRows.of(rows, self.group, rings, place, expected)
