"""Two neighbouring layers whose rows are merged after the later one has got and read its own (MiniCache)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvfoundry.layouts.base import RowsView
from kvfoundry.layouts.pair_store import MiniCachePairStore
from kvfoundry.layouts.paired import PairedRows

if TYPE_CHECKING:
    from kvfoundry.layer import CacheLayer
    from kvfoundry.method import Method


# Mean angle in degrees from which a shared direction is far from both rows; unrelated rows are 90 apart.
FAR_APART = 45.0


@dataclass
class LayerPair:
    """numbers: of the two layers in the model; store: where the merged rows of all pairs of one cache are."""

    store: MiniCachePairStore
    numbers: tuple[int, int]
    earlier: CacheLayer
    later: CacheLayer

    def bind(self) -> None:
        """Tell both layers that they are a pair."""
        self.earlier.pair = self.later.pair = self

    def after(self, layer: CacheLayer, *, prompt_open: bool) -> None:
        """After a call of one of the layers: merge what both have, once the prompt is complete."""
        if layer is not self.later or prompt_open:
            return
        self.store.merge_pair(*self.numbers, _fresh(self.earlier), _fresh(self.later))
        self.earlier.rows = PairedRows.merged(self.store, self.numbers, "earlier")
        self.later.rows = PairedRows.merged(self.store, self.numbers, "later")
        self.later.note_bytes()  # first the one that gave its rows away
        self.earlier.note_bytes()

    def clear(self) -> None:
        """Forget the merged rows."""
        self.store.clear_pair(*self.numbers)

    def fork(self, store: MiniCachePairStore, layers: Sequence[Any]) -> LayerPair:
        """The same pair among the forked layers of the model, with a fork of the store behind them."""
        twin = LayerPair(store, self.numbers, *(layers[number] for number in self.numbers))
        for layer in (twin.earlier, twin.later):
            if isinstance(layer.rows, PairedRows):
                layer.rows = layer.rows.in_store(store)
        twin.bind()
        return twin


def _fresh(layer: CacheLayer) -> RowsView:
    """The rows of a layer that are not merged yet."""
    assert layer.rows is not None
    return layer.rows.fresh.view() if isinstance(layer.rows, PairedRows) else layer.rows.view()


def far_apart(method: Method, store: MiniCachePairStore) -> list[str]:
    """What a reader of results must know where the rows of a pair have little in common; empty where they do."""
    if store.furthest is None or store.furthest[1] <= FAR_APART:
        return []
    (earlier, later), degrees = store.furthest
    return [
        f"{method}: keys and values of layers {earlier} and {later} are {degrees:.0f} degrees apart on average "
        "(unrelated rows are 90), so merging them changes answers; merge fewer layers (start) or retain more rows."
    ]
