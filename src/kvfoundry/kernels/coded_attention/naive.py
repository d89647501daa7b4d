"""Reference attention over coded rows: decode a tile, attend to it, combine by running maximum (as FlashAttention).

No more than one tile of decoded rows exists at a time. With logits s_j of the rows j of all tiles so far,

    m = max_j s_j,  l = sum_j exp(s_j - m),  o = sum_j exp(s_j - m) v_j;  the output is o / l.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kvfoundry.visibility import Visibility

# Rows that are decoded at once.
TILE = 512


class RowSource(Protocol):
    """Keys or values of every head, however they are stored.

    rows: name -> [slots, ...] packed codes and whatever else a row has of its own, head after head without gaps.
    tables: name -> [blocks, ...], shared by the rows of a block, head after head.
    counts: [batch, heads] rows of each head that are stored as codes, on the CPU.
    `tile` is the reference way of reading them; a fused kernel reads these tensors itself.
    """

    @property
    def rows(self) -> dict[str, Tensor]: ...

    @property
    def tables(self) -> dict[str, Tensor]: ...

    @property
    def counts(self) -> Tensor: ...

    def tile(self, start: int, stop: int, dtype: torch.dtype, positions: Tensor, *, turned: bool = False) -> Tensor:
        """Rows start to stop of every head, decoded: [batch, heads, stop - start, dim]; finite where there is none.

        positions: [batch, heads or 1, stop - start] token index of these rows. turned: keys as turned queries read
        them, see the rotation of `KVCodec`.
        """
        ...


def attend(
    query: Tensor,
    keys: RowSource,
    values: RowSource,
    visibility: Visibility,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tile: int = TILE,
) -> Tensor:
    """Attention output [batch, query_heads, queries, value_dim].

    query: [batch, query_heads, queries, head_dim], turned where the keys are. visibility: its key_positions
    [batch, heads or 1, rows] say which rows there are. Logits in the dtype of the query, softmax in float32.
    """
    batch, query_heads, queries, _ = query.shape
    positions = visibility.key_positions
    total = positions.shape[2]
    best = total_weight = output = None
    for start in range(0, total, tile):
        stop = min(start + tile, total)
        where = positions[:, :, start:stop]
        key = keys.tile(start, stop, query.dtype, where, turned=True)
        value = values.tile(start, stop, query.dtype, where)
        heads = key.shape[1]
        packed = query.reshape(batch, heads, -1, query.shape[3])
        logits = (packed @ key.transpose(-1, -2)).view(batch, query_heads, queries, stop - start) * scaling
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        seen = replace(visibility, key_positions=where, pattern="masked").block(0, queries)
        seen = seen.expand(-1, heads, -1, -1).repeat_interleave(query_heads // heads, dim=1)
        logits = logits.float().masked_fill(~seen, -torch.inf)
        highest = logits.amax(dim=-1, keepdim=True)
        if best is not None:
            highest = torch.maximum(best, highest)
        # A query may see nothing of a tile: exp(-inf - -inf) is no number.
        anchor = highest.masked_fill(highest == -torch.inf, 0.0)
        weights = torch.exp(logits - anchor)
        part = (weights.to(value.dtype).reshape(batch, heads, -1, stop - start) @ value).float()
        part = part.view(batch, query_heads, queries, -1)
        if best is None:
            total_weight, output = weights.sum(dim=-1, keepdim=True), part
        else:
            assert total_weight is not None and output is not None
            shrink = torch.exp(best - anchor)
            total_weight = total_weight * shrink + weights.sum(dim=-1, keepdim=True)
            output = output * shrink + part
        best = highest
    assert best is not None and total_weight is not None and output is not None
    if sinks is not None:
        anchor = best.masked_fill(best == -torch.inf, 0.0)
        total_weight = total_weight + torch.exp(sinks.float().view(1, -1, 1, 1) - anchor)
    return (output / total_weight).to(query.dtype)
