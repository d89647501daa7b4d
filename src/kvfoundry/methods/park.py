"""Parking on the host: dropped rows free the device, and a later question can bring them back."""

from kvfoundry.merging.park import Park
from kvfoundry.method import Piece
from kvfoundry.registry import register


@register(paper="axis", axes={"dispose": "parked on the host until `cache.recall()`"}, kind="piece")
def park() -> Piece:
    """Keep dropped rows in host memory; `cache.recall()` brings them back, bit for bit, to where they were.

    Any evicting method takes it: snapkv(budget=256)+park(). The device holds what the method keeps (`cache.nbytes`),
    the host the rest (`cache.parked_nbytes`), and both together every row ever stored. What recall() makes equal to
    never having dropped anything, and when the method acts again, is written at `KVCache.recall`. Rows come back beside
    those that stayed, so these have to be what they were: codecs and slot positions are refused, and so is another
    disposal (cam, a merge).
    """
    return Piece(dispose=Park())
