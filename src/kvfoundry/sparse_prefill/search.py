"""Which pattern serves a head best when all cost the same: the smallest change of what the head says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvfoundry.checks import whole
from kvfoundry.errors import SpecError
from kvfoundry.kernels.attention.naive import query_block
from kvfoundry.kernels.sparse_prefill.naive import visible
from kvfoundry.sparse_prefill.a_shape import AShape
from kvfoundry.sparse_prefill.block_sparse import BlockSparse
from kvfoundry.sparse_prefill.patterns import Pattern, Sight
from kvfoundry.sparse_prefill.prefill import index_of
from kvfoundry.sparse_prefill.vertical_slash import VerticalSlash

# The splits of the paper's search space: first rows to window 1024 : 4096, single rows to slash lines 30 : 2048,
# 100 : 1800, 500 : 1500 and 3000 : 200.
_FIRST = 1024 / (1024 + 4096)
_VERTICAL = (30 / 2078, 100 / 1900, 500 / 2000, 3000 / 3200)


def candidates(cost: int, tile: int, block: int, default: VerticalSlash | None = None) -> list[Pattern]:
    """The patterns to choose from. A tile that sees enough computes `cost` rows under each, in whole blocks.

    The blocks of the tile itself, which every pattern reads, count. default: what vertical-slash has beside its sizes.
    Raises SpecError for a cost that leaves nothing to share out.
    """
    whole("cost", cost, least=1)
    own, room = tile // block, cost // block - tile // block
    if room < 2:
        raise SpecError(
            f"a cost of {cost} rows leaves nothing to choose beside a tile's own {tile}; give at least "
            f"{(own + 2) * block}."
        )
    default = default or VerticalSlash()
    first = min(room - 1, max(1, round(_FIRST * room)))
    verticals = dict.fromkeys(min(room - 1, max(1, round(share * room))) for share in _VERTICAL)
    return [
        AShape(first * block, (room - first) * block),
        *(replace(default, vertical=count * block, slash=(room - count) * block) for count in verticals),
        BlockSparse(room + own),
    ]


@torch.no_grad()
def output_errors(sight: Sight, value: Tensor, patterns: Sequence[Pattern], queries: Tensor) -> Tensor:
    """How far the output of every head is from dense attention under each pattern: [len(patterns), query_heads].

    The squared distance over some queries of all batch rows, as a share of the squared output. value: [batch, heads,
    rows, value_dim]; queries: their numbers within the call.
    """
    batch, query_heads, _, dim = sight.query.shape
    heads, rows = sight.key.shape[1], sight.key.shape[2]
    indices = [index_of(sight, (pattern,) * query_heads) for pattern in patterns]
    keys, values = sight.key.float().transpose(-1, -2), value.float()
    wrong = torch.zeros(len(patterns), query_heads, device=value.device)
    size = torch.zeros(query_heads, device=value.device)
    own = sight.expanded(sight.tiles.first)[..., None] + queries
    at = torch.arange(rows, device=value.device)
    for part in range(0, len(queries), step := query_block(value.device, batch, query_heads, rows)):
        chosen = queries[part : part + step]
        logits = torch.matmul(sight.query[:, :, chosen].float().reshape(batch, heads, -1, dim), keys) * sight.scaling
        logits = logits.view(batch, query_heads, -1, rows)
        if sight.softcap is not None:
            logits = torch.tanh(logits / sight.softcap) * sight.softcap
        logits = logits.masked_fill(at > own[:, :, part : part + step, None], -torch.inf)
        dense = _outputs(logits, values, sight.sinks)
        size += dense.square().sum(dim=(0, 2, 3))
        for number, index in enumerate(indices):
            found = _outputs(logits.masked_fill(~visible(index, chosen, rows), -torch.inf), values, sight.sinks)
            wrong[number] += (found - dense).square().sum(dim=(0, 2, 3))
    return wrong / size.clamp(min=1e-20)


def _outputs(logits: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
    total = logits.logsumexp(dim=-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float().view(1, -1, 1, 1))
    weights = (logits - total.masked_fill(total == -torch.inf, 0.0)).exp()
    grouped = weights.reshape(*values.shape[:2], -1, values.shape[2])
    return torch.matmul(grouped, values).view(*weights.shape[:3], -1)
