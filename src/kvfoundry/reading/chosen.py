"""Pages of rows on the host, chosen, fetched and read for one query without asking the device anything on the way.

The reader's general way waits for the device several times (how wide is the table? is all of it there?). Here every
shape follows from the budget: so many pages of every head, the last of which is the one that is being filled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvfoundry.kernels.available import without_triton
from kvfoundry.kernels.decode_attention import naive as decode_naive
from kvfoundry.kernels.page_selection import naive as select_naive
from kvfoundry.layouts.base import Reading, Stretches
from kvfoundry.layouts.host import counted
from kvfoundry.layouts.streamed import StreamedSlots
from kvfoundry.reading.state import PageState

if TYPE_CHECKING:
    from kvfoundry.reading.reader import PageReader


def serves(reader: PageReader, rows: Stretches, query: Tensor, budget: Tensor) -> bool:
    """Whether `attend` reads these rows as the reader would."""
    return (
        isinstance(rows.keys, StreamedSlots)
        and query.shape[2] == 1
        and reader.rule == "kernel"
        and reader.granularity == "kv_head"
        and bool((budget == budget[0]).all())
        and bool((rows.lengths > budget[0]).all())
    )


def attend(
    reader: PageReader, rows: Stretches, query: Tensor, reading: Reading, state: PageState, budget: int
) -> Tensor:
    """Output [batch, query_heads, 1, value_dim] over the best pages of at most `budget` rows; query alike."""
    page, device = reader.page, query.device
    select, decode = _kernels(device)
    lengths = counted(rows.lengths, device, torch.int32)
    low, high = state.with_room(int(-(-rows.lengths.max() // page)))
    table, counts = select(
        query[:, :, 0], low, high, lengths, page=page, budget=max(2, budget // page), group=reader.group
    )
    index = table.long()[..., None] * page + torch.arange(page, device=device)
    index = index.masked_fill(table[..., None] < 0, -1).flatten(2)
    # Pages are in ascending order, so only the last one, which is always read, can be partly filled.
    read = counts * page - (-lengths) % page
    output: Tensor = decode(
        query, rows.keys.at(index), rows.values.at(index), read.int().contiguous(),  # type: ignore[attr-defined]
        scaling=reading.scaling, softcap=reading.softcap, sinks=reading.sinks,
    )  # fmt: skip
    return output


def _kernels(device: torch.device) -> tuple[Any, Any]:
    if without_triton(device) is not None:
        return select_naive.select, decode_naive.attend
    from kvfoundry.kernels.decode_attention import fused as decode
    from kvfoundry.kernels.page_selection import fused as select

    return select.select, decode.attend
