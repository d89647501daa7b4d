"""Rectangles [batch, heads, rows, ...] whose heads are filled from the front to different lengths. Nothing is written
in place: results are new tensors, so forks may share them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.kernels.gather_rows.naive import picked


def span(starts: Tensor, counts: Tensor) -> Tensor:
    """Numbers starts, starts + 1, ... of every head: [batch, heads, widest], -1 behind its `counts`; on the CPU."""
    offset = torch.arange(int(counts.max()) if counts.numel() else 0)
    return (starts[..., None] + offset).masked_fill(offset >= counts[..., None], -1)


def cut(rectangle: Tensor, starts: Tensor, counts: Tensor, fill: float = 0) -> Tensor:
    """Rows starts to starts + counts of every head, [batch, heads] each on the CPU, moved to the front."""
    width = int(counts.max()) if counts.numel() else 0
    if bool((starts == 0).all()) and bool((counts == width).all()):
        part = rectangle[:, :, :width]
        return part if width == rectangle.shape[2] else part.clone()
    if bool((starts == starts.flatten()[0]).all()) and bool((counts == width).all()):
        start = int(starts.flatten()[0])
        return rectangle[:, :, start : start + width].clone()
    return picked(rectangle, span(starts, counts).to(rectangle.device), fill)


def appended(rectangle: Tensor, lengths: Tensor, new: Tensor, added: Tensor, fill: float = 0) -> Tensor:
    """The first `lengths` rows of every head followed by the first `added` of `new`; [batch, heads] on the CPU each."""
    width, tokens = rectangle.shape[2], new.shape[2]
    if bool((lengths == width).all()) and bool((added == tokens).all()):
        return torch.cat([rectangle, new], dim=2)
    total = lengths + added
    row = torch.arange(int(total.max()) if total.numel() else 0)
    index = torch.where(row < lengths[..., None], row, width + row - lengths[..., None])
    index = index.masked_fill(row >= total[..., None], -1)
    return picked(torch.cat([rectangle, new], dim=2), index.to(rectangle.device), fill)
