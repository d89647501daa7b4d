"""What a sparse prompt attention reads: tiles of queries, and for each of them blocks of rows and single rows.

Queries are cut into tiles of `query_block`, rows into blocks of `key_block`, both counted from the first row of a head.
A block is named by its distance from the block in which its tile ends, so a slash line is one number for all tiles of a
head, and a list per tile is needed only where tiles read differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.attention.naive import query_block


@dataclass(frozen=True, eq=False)
class Tiles:
    """Where the queries of a call stand. They are the newest rows of their head, so their causality is that of slots.

    lengths: [batch, heads] rows of every stored head; counts: [batch] queries of every batch row; both int64, on the
    device. number: tiles of the head that has most of them; the same index means another place in another head. blocks:
    blocks of the longest head, whole tiles of them. shortest: rows of the shortest head. causal: blocks in the causal
    triangles of all stored heads. even: every batch row has as many queries.
    """

    lengths: Tensor
    counts: Tensor
    query_block: int
    key_block: int
    number: int
    blocks: int
    shortest: int
    causal: int
    even: bool

    @classmethod
    def of(cls, lengths: Tensor, counts: Tensor, query_block: int, key_block: int, device: torch.device | str) -> Tiles:
        """lengths, counts: as the fields, on the CPU."""
        if query_block % key_block or key_block < 1:
            raise KVFoundryError(f"tiles of {query_block} queries are no multiple of blocks of {key_block} rows.")
        if bool((lengths < counts[:, None]).any()):
            raise KVFoundryError("the queries are the last rows of every head: there are fewer rows than queries.")
        lengths, counts = lengths.long(), counts.long()
        ratio = query_block // key_block
        first, last = (lengths - counts[:, None]) // query_block, -(-lengths // query_block)
        # a tile t reads up to (t + 1) ratio blocks: the sum of an arithmetic row
        triangles = (last * (last + 1) - first * (first + 1)) // 2 * ratio
        return cls(
            lengths.to(device),
            counts.to(device),
            query_block,
            key_block,
            int((last - first).max()),
            int(last.max()) * ratio,
            int(lengths.min()),
            int(triangles.sum()),
            bool((counts == counts[0]).all()),
        )

    @property
    def ratio(self) -> int:
        """Blocks of rows in a tile of queries."""
        return self.query_block // self.key_block

    @property
    def first(self) -> Tensor:
        """Slot of the first query: [batch, heads]."""
        return self.lengths - self.counts[:, None]

    @property
    def tops(self) -> Tensor:
        """The block in which every tile ends: [batch, heads, number]; -1 for a tile that this head does not have."""
        index = torch.arange(self.number, device=self.lengths.device)
        tile = self.first[..., None] // self.query_block + index
        there = tile * self.query_block < self.lengths[..., None]
        return torch.where(there, (tile + 1) * self.ratio - 1, -1)

    def per_query_head(self, tensor: Tensor, query_heads: int) -> Tensor:
        """[batch, heads, ...] with an entry for every query head."""
        return tensor.repeat_interleave(query_heads // tensor.shape[1], dim=1)


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """What every tile of every query head reads.

    distances: [batch, query_heads, number or 1, width] int32, ascending; the block `top - distance` is read. counts:
    [batch, query_heads, number] int32, how many of them; a tile with a count of `top + 1` reads every block, whatever
    distances say. columns: [batch, query_heads, most] int32 ascending, slots of single rows that are read beside the
    blocks, beyond every row where there is none. column_counts: [batch, query_heads, number] int32, how many of these
    a tile looks at; single: [batch, query_heads, number, most] bool, which of these it reads by themselves, because
    their block is not read.
    """

    tiles: Tiles
    distances: Tensor
    counts: Tensor
    columns: Tensor
    column_counts: Tensor
    single: Tensor

    @classmethod
    def of(
        cls, tiles: Tiles, tops: Tensor, distances: Tensor, counts: Tensor, columns: Tensor, covered: Tensor
    ) -> BlockIndex:
        """What was chosen for some query heads, columns in any order.

        tops: those of the tiles, for these heads. covered: [batch, heads, blocks] bool by distance, whether the block
        is read, so that columns in it are read with it.
        A tile that would compute as much as with every block it can see reads every block, and no column by itself.
        """
        columns = columns.sort(dim=-1).values
        ends = ((tops + 1) * tiles.key_block).contiguous()
        below = torch.searchsorted(columns, ends)
        counts = torch.minimum(counts, tops + 1)
        whole = (counts + _blocks_of(below, tiles.key_block) > tops) | (counts > tops)
        counts, below = torch.where(whole, tops + 1, counts), torch.where(whole, 0, below)
        single = _singles(columns, below, tops, covered, tiles.key_block)
        return cls(tiles, distances.int(), counts.int(), columns.int(), below.int(), single)

    @property
    def computed(self) -> Tensor:
        """Blocks that are computed, over all query heads; so many single rows as a block has count as one. A scalar."""
        singles = _blocks_of(self.column_counts, self.tiles.key_block)
        return self.counts.sum(dtype=torch.int64) + singles.sum(dtype=torch.int64)

    @property
    def causal(self) -> int:
        """Blocks of dense attention over all query heads."""
        return self.tiles.causal * (self.counts.shape[1] // self.tiles.lengths.shape[1])


def merged(parts: Sequence[tuple[Tensor, BlockIndex]], query_heads: int) -> BlockIndex:
    """One index from those of several sets of query heads; each part: the numbers of its heads and their index."""
    heads, indices = zip(*parts, strict=True)
    if len(parts) == 1 and len(heads[0]) == query_heads:
        return indices[0]
    order = torch.cat(heads).argsort()
    tall = max(index.distances.shape[2] for index in indices)
    beyond = int(torch.iinfo(torch.int32).max)

    def joined(name: str, fill: int) -> Tensor:
        tensors = [getattr(index, name) for index in indices]
        width = max(tensor.shape[-1] for tensor in tensors)
        wide = [torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]), value=fill) for tensor in tensors]
        if name == "distances":
            wide = [tensor.expand(-1, -1, tall, -1) for tensor in wide]
        return torch.cat(wide, dim=1).index_select(1, order)

    return BlockIndex(
        indices[0].tiles,
        joined("distances", beyond),
        joined("counts", 0),
        joined("columns", beyond),
        joined("column_counts", 0),
        joined("single", 0),
    )


def _singles(columns: Tensor, below: Tensor, tops: Tensor, covered: Tensor, block: int) -> Tensor:
    """The field `single`, some tiles at a time: an index of columns for each tile takes eight times its room."""
    (batch, heads, number), most = tops.shape, columns.shape[2]
    found = torch.zeros(batch, heads, number, most, dtype=torch.bool, device=columns.device)
    step = query_block(columns.device, batch, heads, most)
    there = torch.arange(most, device=columns.device) < below[..., None]
    for start in range(0, number, step):
        part = slice(start, start + step)
        distance = tops[:, :, part, None] - (columns // block)[:, :, None]
        read = covered.gather(2, distance.clamp(min=0).flatten(2)).view_as(distance)
        found[:, :, part] = there[:, :, part] & ~read
    return found


def _blocks_of(rows: Tensor, block: int) -> Tensor:
    return (rows + block - 1) // block
