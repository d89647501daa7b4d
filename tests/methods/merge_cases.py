"""Rows for hand-computed merges, and the laws that every merge shares."""

import torch
from torch import Tensor

from kvfoundry.kernels.attention import backend
from kvfoundry.layouts.base import Reading, RowsView
from kvfoundry.selection.evidence import Evidence


def rows_of(keys: list[list[float]], values: list[list[float]], padding: int = 0) -> RowsView:
    """One batch row, one head; `padding` slots behind the rows hold keys and values that would disturb any merge."""
    key, value = (torch.tensor([[rows]], dtype=torch.float32) for rows in (keys, values))
    count = key.shape[2]
    rubbish = torch.full((1, 1, padding, key.shape[3]), 7.0)
    positions = torch.cat([torch.arange(count), torch.full((padding,), -1)])[None, None]
    return RowsView(
        torch.cat([key, rubbish], dim=2),
        torch.cat([value, rubbish[..., : value.shape[3]]], dim=2),
        positions,
        torch.full((1, 1), count),
    )


def mask_of(*kept: bool, padding: int = 0) -> Tensor:
    return torch.tensor([[[*kept, *[False] * padding]]])


def evidence_of(rows: RowsView, query: list[float] | None = None, decoding: bool = True) -> Evidence:
    """One query behind the rows, without scaling."""
    batch, heads, _, dim = rows.keys.shape
    newest = torch.tensor(query or [0.0] * dim).expand(batch, heads, 1, dim)
    at = rows.positions.amax(dim=(1, 2))[:, None]
    return Evidence(
        newest, at, newest, at, rows, Reading(backend("eager"), 1.0), False, at[:, 0] + 1, 0, 1, decoding=decoding
    )


def scores_of(*scores: float) -> Tensor:
    return torch.tensor([[list(scores)]])
