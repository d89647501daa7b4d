"""Rows in host memory, in the engine: what the prompt left there crosses the link in every step and stays as it is.

Rows of tokens that are decoded lie on the device, like those of other methods, until the engine is done. A step reads
both and joins what it read by the logarithms of the sums of exponentials. Copies go through the ring of the cache, in
an order that is the same in every step, so a CUDA graph holds them with all their waiting. Chosen pages (quest) are
fetched by a kernel instead, those on the device with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvfoundry.engine.coded import Coded
from kvfoundry.engine.rows import StaticRows
from kvfoundry.layouts.base import Layout
from kvfoundry.layouts.dense import DenseRows
from kvfoundry.layouts.ring import Ring
from kvfoundry.layouts.streamed import StreamedRows
from kvfoundry.layouts.streamed_codes import StreamedCodes

Read = tuple[Tensor, Tensor]


class Hosted:
    """The rows of one layer on the host.

    rows: the layout that they stay in; counts: int32 [batch, heads] of them on the device. streams: whether steps read
    them whole, through the ring.
    """

    def __init__(self, rows: StreamedRows | StreamedCodes, *, streams: bool):
        self.rows, self.streams = rows, streams
        self.counts = rows.stored.to(rows.ring.device, torch.int32)
        self._none = torch.zeros_like(self.counts)  # whole rows beside codes

    @property
    def ring(self) -> Ring:
        """Where the rows come to the device."""
        return self.rows.ring

    def attend(self, kernel: Any, query: Tensor, coded: Coded | None, **terms: Any) -> Read:
        """Output [batch, query_heads, 1, value_dim] over these rows alone, and the log of its sums of exponentials.

        kernel: one of `kernels.decode_attention`, or of `kernels.coded_decode` with `coded`, the layer's newer codes.
        """
        groups = query.shape[1] // self.counts.shape[1]
        output = query.new_zeros(*query.shape[:3], self.rows.value_dim)
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        turned = query if coded is None else coded.turned(query)
        for unit, (row, heads) in enumerate(self.rows.spans):
            one, asked = slice(row, row + 1), slice(heads.start * groups, heads.stop * groups)
            own, counts = turned[one, asked], self.counts[one, heads]
            with self.ring.taken(self.rows, unit) as parts:
                if isinstance(self.rows, StreamedRows):
                    keys, values = parts
                    read = kernel.attend(own, keys[None], values[None], counts, **terms, return_lse=True)
                else:
                    whole = (side.tail[one, heads] for side in (self.rows.keys, self.rows.values))
                    read = kernel.attend(
                        own, *self.rows.codes_from(parts), counts, *whole, self._none[one, heads], **terms,
                        return_lse=True,
                    )  # fmt: skip
            output[one, asked], lse[one, asked] = read
        return output, lse

    def fetched(self, pages: Tensor, page: int, rows: StaticRows) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of pages [batch, heads, n], ascending and -1 behind, those in `rows` counted on behind these.

        Returns keys and values [batch, heads, n * page, dim] and how many rows each head has there, int32.
        """
        assert isinstance(self.rows, StreamedRows)
        number = (pages.long()[..., None] * page + torch.arange(page, device=pages.device)).flatten(-2)
        there = (number >= 0) & (number < (self.counts + rows.lengths)[..., None])
        index = number.where(there, -1)
        keys, values = (
            part.at(index, rows.rectangle(newer), rows.lengths)
            for part, newer in zip(self.rows.parts, (rows.keys, rows.values), strict=True)
        )
        self.ring.sent += keys.nbytes + values.nbytes
        return keys, values, there.sum(dim=-1, dtype=torch.int32)

    def keys_of(self, head: int) -> Iterator[Tensor]:
        """The keys of one head of every batch row, one after the other: [rows, head_dim] on the device."""
        assert isinstance(self.rows, StreamedRows)
        self.ring.follow()
        for row, count in enumerate(self.rows.stored[:, head].tolist()):
            shape, dtype = self.rows.parts[0].shape_of(slice(head, head + 1), count)
            keys = torch.empty(shape, dtype=dtype, device=self.ring.device)
            self.rows.parts[0].copy_to(row, slice(head, head + 1), keys)
            yield keys[0]

    def with_newest(self, newest: Layout) -> Layout:
        """The rows with those behind them that the engine has in the end."""
        assert isinstance(self.rows, StreamedRows)
        view = newest.view()
        return self.rows.with_newest(DenseRows(view.keys, view.values, view.positions, view.lengths))

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that holds memory on the device, the ring's aside."""
        yield from (self.counts, self._none)


def joined(one: Read, other: Read) -> Tensor:
    """Attention over two sets of rows, [batch, heads, queries, dim], from what each says alone."""
    (first, first_lse), (second, second_lse) = one, other
    share = torch.sigmoid(first_lse - second_lse)[..., None]  # of two exponentials; 1 where the other saw nothing
    return torch.lerp(second.float(), first.float(), share).to(first.dtype)
