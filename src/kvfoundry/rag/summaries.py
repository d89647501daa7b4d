"""What stays on the device of a chunk that is not there: a few numbers per page of its keys.

A page is some tokens that follow each other. Its summary is made of the keys as they were stored, and moves with the
chunk to another place of a prompt. From a summary and a query follows about how much attention the page would get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvfoundry.checks import choice, whole
from kvfoundry.chunks import ChunkKV
from kvfoundry.errors import DataError
from kvfoundry.reading.pages import page_bounds
from kvfoundry.rope import Rope

Kind = Literal["centroid", "bounds"]
KINDS = ("centroid", "bounds")
PAGE = 8


@dataclass(frozen=True, eq=False)
class KeySummary:
    """Summaries of a chunk's pages in every attention layer.

    kind: "centroid", the mean key of a page, whose estimate is too low by what the keys differ, or "bounds", the
    smallest and the largest number in each channel, whose estimate is too high. parts: per layer, [heads, pages, dim]
    once or twice. sizes: [pages] tokens. first: [pages] position of each page's first token.
    """

    kind: Kind
    page: int
    parts: tuple[tuple[Tensor, ...], ...]
    sizes: Tensor
    first: Tensor

    @classmethod
    def of(cls, chunk: ChunkKV, kind: Kind = "centroid", page: int = PAGE) -> KeySummary:
        """The summary of a plain chunk, where it stands. SpecError for an unknown kind, or a page below 1."""
        choice("summary", kind, KINDS)
        whole("page", page, least=1)
        tokens = len(chunk.token_ids)
        first = torch.arange(0, tokens, page)
        sizes = (tokens - first).clamp(max=page)
        parts: list[tuple[Tensor, ...]] = []
        for layer in chunk.layers:
            keys = layer.keys.float()
            low, high = page_bounds(keys, page)
            parts.append((low, high) if kind == "bounds" else (_means(keys, sizes),))
        return cls(kind, page, tuple(parts), sizes, first + chunk.start)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(tensor.numel() * tensor.element_size() for own in self.parts for tensor in own)

    def moved(self, ropes: Sequence[Rope], by: int, length: int, to_length: int) -> KeySummary:
        """The summary of the chunk when each of its keys stands `by` positions further; lengths as in `Rope.move`."""
        there = self.first[None, None]
        here, lengths = there + by, {"length": length, "to_length": to_length}
        parts: list[tuple[Tensor, ...]] = []
        for rope, own in zip(ropes, self.parts, strict=True):
            if self.kind == "bounds":
                low, high = rope.move_bounds(own[0][None], own[1][None], there, here, **lengths)
                parts.append((low[0], high[0]))
            else:
                parts.append((rope.move(own[0][None], there, here, **lengths)[0],))
        return replace(self, parts=tuple(parts), first=self.first + by)

    def save(self, path: Path) -> None:
        """As a safetensors file."""
        tensors = {
            f"{layer}.{number}": tensor.cpu().contiguous()
            for layer, own in enumerate(self.parts)
            for number, tensor in enumerate(own)
        }
        tensors |= {"sizes": self.sizes, "first": self.first}
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{id(self)}.tmp")
        save_file(tensors, aside)
        aside.replace(path)

    @classmethod
    def load(cls, path: Path, kind: Kind, page: int) -> KeySummary | None:
        """Read what `save` wrote; None where there is no such file, or it is not of this kind and page."""
        try:
            held: Mapping[str, Tensor] = load_file(path)
            sizes, first = held["sizes"], held["first"]
            each = 2 if kind == "bounds" else 1
            layers, odd = divmod(len(held) - 2, each)
            parts = tuple(tuple(held[f"{layer}.{n}"] for n in range(each)) for layer in range(layers))
        except (OSError, SafetensorError, KeyError):
            return None
        paged = bool((sizes[:-1] == page).all()) and 0 < int(sizes[-1]) <= page
        return None if odd or not paged else cls(kind, page, parts, sizes, first)


def _means(keys: Tensor, sizes: Tensor) -> Tensor:
    """[heads, pages, dim]: the mean of every page of keys [heads, tokens, dim]."""
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes).to(keys.device)
    sums = keys.new_zeros(keys.shape[0], len(sizes), keys.shape[2]).index_add_(1, owner, keys)
    return sums / sizes.to(keys.device)[:, None]


class Shelf:
    """The summaries of all candidates of a sample, side by side on the device.

    sizes, owner: [pages] tokens of a page, and whose it is.
    """

    def __init__(self, summaries: Sequence[KeySummary], device: torch.device):
        if len({(each.kind, len(each.parts)) for each in summaries}) != 1:
            raise DataError("summaries of one sample are of different kinds, or of different models; build again.")
        self.kind = summaries[0].kind
        self.parts: list[tuple[Tensor, ...]] = [
            tuple(torch.cat(side, dim=1).to(device) for side in zip(*own, strict=True))
            for own in zip(*(each.parts for each in summaries), strict=True)
        ]
        counts = torch.tensor([len(each.sizes) for each in summaries])
        self.owner = torch.repeat_interleave(torch.arange(len(summaries)), counts).to(device)
        self.sizes = torch.cat([each.sizes for each in summaries]).to(device).float()
        self.candidates = len(summaries)
        self.nbytes = sum(each.nbytes for each in summaries)

    def promised(self, layer: int, query: Tensor, scaling: float, softcap: float | None) -> Tensor:
        """log of the summed exp of the logits that a query is thought to have with each page's keys.

        query: [heads, queries, dim], float32. Returns [heads, queries, pages].
        """
        own = self.parts[layer]
        if self.kind == "bounds":
            low, high = (part.transpose(1, 2) for part in own)
            logits = query.clamp(min=0) @ high + query.clamp(max=0) @ low
        else:
            logits = query @ own[0].transpose(1, 2)
        logits = logits * scaling
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits + self.sizes.log()


def summary_path(folder: Path, name: str, kind: Kind, page: int) -> Path:
    """Where the summary of a chunk lies. name: the id of its key."""
    return folder / "summaries" / f"{kind}-{page}" / name[:2] / f"{name}.safetensors"
