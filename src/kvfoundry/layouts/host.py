"""One part of the rows of every head (their keys, say) in host memory, which is pinned where a CUDA device computes.

Pinning is slow (about a second for a gigabyte) and what is pinned cannot grow, so memory comes in slabs: a few for the
prompt, with some room, and later ever and again another. torch hands out pinned memory in powers of two, so slabs are
of such sizes. Entries are written once and never moved; who shares a part goes on in slabs of his own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfoundry.kernels.available import without_triton
from kvfoundry.kernels.host_rows import naive

# Entries of a slab at least, and the room of a part: this share of what it holds.
_LEAST, _SHARE = 64, 16


@dataclass(frozen=True)
class Slab:
    """entries: [batch, heads, room, ...] on the host. used: [batch, heads] of them, on the CPU. full: no more may come.

    Every head fills the slabs in their order.
    """

    entries: Tensor
    used: Tensor
    full: bool = False

    @property
    def free(self) -> Tensor:
        """Entries of each head that may still come: [batch, heads]."""
        return torch.zeros_like(self.used) if self.full else self.entries.shape[2] - self.used


class HostPart:
    """Entries of every head, one after the other over all slabs.

    device: where they are computed and read. shape: batch rows and heads.
    """

    def __init__(self, device: torch.device, shape: tuple[int, int], slabs: Sequence[Slab] = ()):
        self.device, self.shape = device, shape
        self._slabs = list(slabs)
        # As they are asked for: first and used of every slab on the device, what all use together, and used of every
        # slab as numbers.
        self._bounds: list[tuple[Tensor, Tensor]] = []
        self._total: Tensor | None = None
        self._used: list[list[list[int]]] = []

    def __deepcopy__(self, memo: object) -> HostPart:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.shared()

    @property
    def counts(self) -> Tensor:
        """Entries of each head: [batch, heads], on the CPU."""
        return sum((slab.used for slab in self._slabs), torch.zeros(self.shape, dtype=torch.long))

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that holds memory on the host."""
        for slab in self._slabs:
            yield slab.entries

    @property
    def used_nbytes(self) -> int:
        """Bytes of the entries that are there."""
        return sum(int(slab.used.sum()) * slab.entries[0, 0, :1].nbytes for slab in self._slabs)

    # Writing.

    def append(self, lanes: Sequence[Tensor], expected: int = 0) -> None:
        """Write new entries [n, ...] of every head, batch row after batch row, behind the old ones.

        expected: entries of a head that there will be in the end, where that is known. From a CUDA device the copies
        are enqueued on the current stream, and nobody waits.
        """
        left = torch.tensor([len(lane) for lane in lanes]).view(self.shape)
        held, done, number = self.counts, torch.zeros_like(left), 0
        while bool(left.any()):
            if number == len(self._slabs):
                self._slabs.append(self._slab(lanes[0], int((held + done).max()), int(left.max()), expected))
            slab = self._slabs[number]
            taken = torch.minimum(slab.free, left)
            places = zip(slab.used.flatten().tolist(), done.flatten().tolist(), taken.flatten().tolist(), strict=True)
            for head, lane, (at, start, count) in zip(slab.entries.flatten(0, 1), lanes, places, strict=True):
                if count:
                    head[at : at + count].copy_(lane[start : start + count], non_blocking=True)
            self._slabs[number] = replace(slab, used=slab.used + taken)
            left, done, number = left - taken, done + taken, number + 1
        self._bounds, self._total, self._used = [], None, []

    def _slab(self, like: Tensor, held: int, left: int, expected: int) -> Slab:
        """An empty slab for `left` entries of a head or more, or for the largest part of them.

        held: what other slabs hold already.
        """
        wanted = max(left, expected - held)
        wanted += max(_LEAST, (held + wanted) // _SHARE)
        size = max(1, like[:0].new_empty(1, *like.shape[1:]).nbytes * self.shape[0] * self.shape[1])
        room = max(_LEAST, (1 << ((wanted * size).bit_length() - 1)) // size)
        return Slab(self._memory(like, room), torch.zeros(self.shape, dtype=torch.long))

    def _memory(self, like: Tensor, room: int) -> Tensor:
        with torch.inference_mode(False):  # else nobody could write into it outside of inference mode
            shape = (*self.shape, room, *like.shape[1:])
            return torch.empty(shape, dtype=like.dtype, pin_memory=self.device.type == "cuda")

    # Sharing. Who reads on the host sees to it that what was enqueued has arrived.

    def shared(self) -> HostPart:
        """A second part over the same entries; what either appends goes into slabs of its own."""
        self._slabs = [replace(slab, full=True) for slab in self._slabs]
        return HostPart(self.device, self.shape, self._slabs)

    def selected(self, indices: Tensor) -> HostPart:
        """A copy of the batch rows `indices`."""
        twin = HostPart(self.device, (len(indices), self.shape[1]))
        lanes = [self._entries(row, head) for row in indices.tolist() for head in range(self.shape[1])]
        if self._slabs:
            twin.append([torch.cat(lane) if lane else self._slabs[0].entries[0, 0, :0] for lane in lanes])
        return twin

    # Reading.

    def _entries(self, row: int, head: int) -> list[Tensor]:
        """The entries of one head, slab by slab."""
        if len(self._used) != len(self._slabs):
            self._used = [slab.used.tolist() for slab in self._slabs]
        counts = (used[row][head] for used in self._used)
        return [slab.entries[row, head, :count] for slab, count in zip(self._slabs, counts, strict=True) if count]

    def copy_to(self, row: int, heads: slice, target: Tensor) -> int:
        """Enqueue copies of the entries of some heads to the front of `target` [heads, room, ...]; their bytes."""
        size = 0
        for lane, head in zip(target, range(heads.start, heads.stop), strict=True):
            at = 0
            for entries in self._entries(row, head):
                lane[at : at + len(entries)].copy_(entries, non_blocking=True)
                at, size = at + len(entries), size + entries.nbytes
        return size

    def shape_of(self, heads: slice, room: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a target of `copy_to` for so many entries of each head."""
        like = self._slabs[0].entries
        return (heads.stop - heads.start, room, *like.shape[3:]), like.dtype

    def rectangle(self, room: int = 0) -> Tensor:
        """All entries on the device, zeros behind those of a shorter head: [batch, heads, longest + room, ...]."""
        like = self._slabs[0].entries
        width = int(self.counts.max()) + room
        target = torch.zeros(*self.shape, width, *like.shape[3:], dtype=like.dtype, device=self.device)
        for row in range(self.shape[0]):
            self.copy_to(row, slice(0, self.shape[1]), target[row])
        return target

    def flat(self) -> Tensor:
        """All entries on the device, head after head without gaps: [entries, ...]."""
        lanes = [piece for row in range(self.shape[0]) for h in range(self.shape[1]) for piece in self._entries(row, h)]
        return torch.cat([piece.to(self.device, non_blocking=True) for piece in lanes])

    def at(self, index: Tensor, behind: Tensor | None = None, waiting: Tensor | None = None) -> Tensor:
        """The entries `index` [batch, heads, n] of every head: [batch, heads, n, ...], zeros where it has none.

        behind: further entries [batch, heads, room, ...] and `waiting` [batch, heads] of each head, on the device. On a
        CUDA device a kernel reads the pinned memory over the link, see `kernels.host_rows.fused`.
        """
        like = self._slabs[0].entries
        out = torch.zeros(*index.shape, *like.shape[3:], dtype=like.dtype, device=index.device)
        gather = naive.gather
        if without_triton(index.device) is None:
            from kvfoundry.kernels.host_rows import fused

            gather = fused.gather
        index = index.contiguous()
        for slab, (first, used) in zip(self._slabs, self._bounds_on(index.device), strict=True):
            gather(slab.entries, index, first, used, out)
        if behind is not None and waiting is not None and behind.shape[2]:
            gather(behind.contiguous(), index, self._total_on(index.device), waiting, out)
        return out

    def _total_on(self, device: torch.device) -> Tensor:
        if self._total is None:
            self._total = counted(self.counts, device)
        return self._total

    def _bounds_on(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        if len(self._bounds) != len(self._slabs):
            first = torch.zeros(self.shape, dtype=torch.long)
            self._bounds = []
            for slab in self._slabs:
                self._bounds.append((first.to(device), slab.used.to(device)))
                first = first + slab.used
        return self._bounds


def counted(counts: Tensor, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers [batch, heads] on a device, without a copy to wait for where heads are alike."""
    first = int(counts[0, 0])
    if bool((counts == first).all()):
        return torch.full(tuple(counts.shape), first, dtype=dtype, device=device)
    return counts.to(device, dtype)
