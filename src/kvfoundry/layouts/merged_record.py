"""The rows of a merged pair of layers (MiniCache) as named tensors, and back. What both share lies with the earlier.

merged    earlier layer: `fresh.` and `directions.` as plain records, `magnitude.<half>.<side>` [heads, rows], lengths,
          `retained.<side>.slots` [heads, widest], `.bound` [heads] and `.<half>` [heads, widest, dim]
partner   later layer: `fresh.` and lengths
"""

from __future__ import annotations

from torch import Tensor

from kvfoundry.layouts.dense import DenseRows
from kvfoundry.layouts.pair_store import HALVES, SIDES, Half, MergedPair, MiniCachePairStore, Retained, Side
from kvfoundry.layouts.paired import PairedRows
from kvfoundry.layouts.record import Record, copied, prefixed


def record_of_pair(rows: PairedRows) -> Record:
    """A copy of one layer's part of a pair, of one batch row."""
    tensors = prefixed("fresh", Record.plain(rows.fresh.view(), apart=True).tensors)
    tensors["lengths"] = rows.lengths[0].int()
    if rows.half == "later":
        return Record("partner", tensors)
    pair = rows.merged_pair
    tensors |= prefixed("directions", Record.plain(pair.directions.view(), apart=True).tensors)
    parts: dict[str, Tensor] = {}
    for side in SIDES:
        held = pair.retained[side]
        parts |= {f"retained.{side}.slots": held.slots[0], f"retained.{side}.bound": held.bound[0]}
        for half in HALVES:
            parts[f"retained.{side}.{half}"] = held.rows[half][0]
            parts[f"magnitude.{half}.{side}"] = pair.magnitudes[half, side][0]
    device = pair.device("earlier")  # a record lies in one place
    return Record("merged", tensors | copied({name: part.to(device) for name, part in parts.items()}))


def restored_half(record: Record, half: Half, store: MiniCachePairStore, numbers: tuple[int, int]) -> PairedRows:
    """The layout of one layer of the pair `numbers`; the earlier one, which comes first, fills the store."""
    fresh = _dense(record.part("fresh"))
    if half == "earlier":
        named = record.tensors
        magnitudes: dict[tuple[Half, Side], Tensor] = {
            (of, side): named[f"magnitude.{of}.{side}"][None] for of in HALVES for side in SIDES
        }
        retained: dict[Side, Retained] = {}
        for side in SIDES:
            rows: dict[Half, Tensor] = {of: named[f"retained.{side}.{of}"][None] for of in HALVES}
            slots, bound = (named[f"retained.{side}.{what}"][None] for what in ("slots", "bound"))
            retained[side] = Retained(slots, rows, bound)
        store.put(*numbers, MergedPair(_dense(record.part("directions")), magnitudes, retained).shared())
    else:
        device = record.tensors["fresh.keys"].device
        store.put(*numbers, store.pair(*numbers).with_later_on(device))
    return PairedRows(store, numbers, half, fresh.shared())


def _dense(record: Record) -> DenseRows:
    rows = record.restored(0, None, record.tensors["keys"].dtype)
    assert isinstance(rows, DenseRows)
    return rows
