"""Attention inside chunks of the prompt without causality (Compactor's attention term)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfoundry.devices import carried
from kvfoundry.layouts.base import Columns
from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.pooling import pooled
from kvfoundry.selection.scores.base import Score

_COLUMN = "chunk_attention"


@dataclass(frozen=True)
class ChunkAttention(Score):
    """Column sums of softmax(q k) over chunks of `chunk` tokens, later tokens included, times the value norm.

    Chunks are counted inside each call. padded: a last chunk that is short is filled up with zero rows that ask and are
    asked like real ones, as the reference does; else it is simply shorter.
    """

    chunk: int = 256
    padded: bool = False

    @property
    def accumulates(self) -> bool:
        return True

    @property
    def needs_every_query(self) -> bool:
        return True

    def observe(self, evidence: Evidence) -> Columns:
        rows, earlier = evidence.rows, evidence.rows.columns.get(_COLUMN)
        batch, heads, count, _ = rows.keys.shape
        tokens = evidence.query.shape[2]
        fresh = (evidence.query_positions >= 0).sum(dim=1)
        # The rows of this call are the newest of every head.
        slots = carried(rows.lengths, fresh.device) - fresh[:, None]
        offset = torch.arange(tokens, device=fresh.device)
        index = (slots[..., None] + offset).clamp(max=count - 1)
        real = (offset < fresh[:, None])[:, None].expand(-1, heads, -1)
        keys = rows.keys.gather(2, index[..., None].expand(-1, -1, -1, rows.keys.shape[3]))
        found = self._received(evidence.query, keys, real)  # [batch, heads, tokens, groups]
        column = earlier
        if column is None:
            column = torch.zeros(batch, heads, count, evidence.groups, device=rows.keys.device)
        index, found = index[..., None].expand_as(found), found * real[..., None]
        return {_COLUMN: column.scatter_add(2, index, found)}

    def _received(self, query: Tensor, keys: Tensor, real: Tensor) -> Tensor:
        batch, heads, tokens, dim = keys.shape
        groups = query.shape[1] // heads
        query = query.view(batch, heads, groups, tokens, dim).float() * real[:, :, None, :, None]
        keys = keys.float() * real[..., None]
        parts = []
        for start in range(0, tokens, self.chunk):
            stop = min(start + self.chunk, tokens)
            logits = query[..., start:stop, :] @ keys[:, :, None, start:stop].transpose(-1, -2)
            own = real[:, :, None, start:stop]
            if self.padded:
                parts.append(self._with_padding(logits, own))
                continue
            weights = logits.masked_fill(~own[..., None, :], torch.finfo(logits.dtype).min).softmax(dim=-1)
            parts.append((weights * own[..., None]).sum(dim=-2))
        return torch.cat(parts, dim=-1).transpose(2, 3)

    def _with_padding(self, logits: Tensor, own: Tensor) -> Tensor:
        """Absent rows have logit 0 both ways: as keys they take weight, as queries they spread theirs evenly."""
        present = own.sum(dim=-1, keepdim=True).float()
        absent = self.chunk - present
        # Slots of the tensor that are not real have logit 0 already; only the rest of the chunk is to be added.
        outside = float(self.chunk - logits.shape[-1])
        top = logits.amax(dim=-1, keepdim=True).clamp(min=0.0)
        weights = (logits - top).exp()
        weights = weights / (weights.sum(dim=-1, keepdim=True) + outside * (-top).exp())
        asked = (weights * own[..., None]).sum(dim=-2)
        return asked + absent / self.chunk

    def __call__(self, evidence: Evidence) -> Tensor:
        rows = evidence.rows
        batch, heads, count, groups = rows.columns[_COLUMN].shape
        received = rows.columns[_COLUMN].transpose(2, 3).reshape(batch, heads * groups, count)
        weighed = evidence.reduced(received) * rows.values.float().norm(dim=-1)
        return pooled(weighed, rows.valid, 3, "avg")
