"""ThinK: which key channels matter to the queries, and keys without the others.

ThinK: Thinner Key Cache by Query-Driven Pruning, arXiv 2407.21018.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from kvfoundry.codecs.base import RowsCodec

if TYPE_CHECKING:
    from kvfoundry.layouts.base import Layout, RowsView


@dataclass(frozen=True)
class KeyChannels(RowsCodec):
    """Keys without int(head_dim * ratio) of their channels; the last `window` queries of the prompt say which.

    The newest `recent` rows of a head stay whole; a `block` more is pruned as soon as it is there. granularity: one set
    of channels per stored head, or per query head (which stores a row for each).
    """

    ratio: float
    size: int
    recent: int
    block: int
    granularity: Literal["kv_head", "query_head"] = "kv_head"

    readable_by_pages = False

    @property
    def fits(self) -> bool:
        return True

    @property
    def window(self) -> int:
        return self.size

    @property
    def remedy(self) -> str:
        return "prune fewer channels (a lower ratio)"

    def store(self, view: RowsView, query: Tensor | None) -> Layout:
        from kvfoundry.layouts.base import split_groups
        from kvfoundry.layouts.channel_pruned import ChannelPrunedRows

        assert query is not None
        groups = query.shape[1] // view.keys.shape[1]
        if self.granularity == "query_head" and groups > 1:
            view = replace(
                view,
                keys=view.keys.repeat_interleave(groups, dim=1),
                values=view.values.repeat_interleave(groups, dim=1),
                positions=view.head_positions.repeat_interleave(groups, dim=1),
                lengths=view.lengths.repeat_interleave(groups, dim=1),
                columns={name: split_groups(column, groups) for name, column in view.columns.items()},
            )
        channels = kept_channels(channel_scores(query, view.keys, view.valid), self.ratio)
        return ChannelPrunedRows.pruned(view, channels, self.recent, self.block)


def channel_scores(query: Tensor, keys: Tensor, key_real: Tensor) -> Tensor:
    """Energy that each key channel can contribute to q.k: [batch, heads, head_dim], float32.

    score_d = mean over queries and the query heads of a group of q_d^2, times the mean over rows of k_d^2. It is the
    Frobenius norm of the outer product of the two columns, squared and averaged.
    query: [batch, query_heads, queries, head_dim], heads divides query_heads; zeros in place of padding make all
    scores of a batch row smaller alike. keys: [batch, heads, rows, head_dim]; key_real: [batch, heads, rows].
    """
    asked = query.float().square().mean(dim=2).unflatten(1, (keys.shape[1], -1)).mean(dim=2)
    squares = (keys.float().square() * key_real[..., None]).sum(dim=2)
    return asked * squares / key_real.sum(dim=2).clamp(min=1)[..., None]


def kept_channels(scores: Tensor, ratio: float) -> Tensor:
    """The channels that stay, ascending: all but the int(head_dim * ratio) lowest scores, [..., kept].

    scores: [..., head_dim]. Of equal scores the earlier channels stay.
    """
    kept = scores.shape[-1] - int(scores.shape[-1] * ratio)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order[..., :kept].sort(dim=-1).values


def picked_channels(keys: Tensor, channels: Tensor) -> Tensor:
    """The keys' values in the kept channels: [batch, heads, rows, head_dim] to [batch, heads, rows, kept]."""
    return keys.gather(3, channels[:, :, None].expand(-1, -1, keys.shape[2], -1))


def with_all_channels(pruned: Tensor, channels: Tensor, head_dim: int) -> Tensor:
    """Zeros in the channels that are gone: [batch, heads, rows, kept] to [batch, heads, rows, head_dim]."""
    whole = pruned.new_zeros(*pruned.shape[:3], head_dim)
    return whole.scatter(3, channels[:, :, None].expand_as(pruned), pruned)


def queries_for(query: Tensor, channels: Tensor) -> Tensor:
    """Queries in the channels of the head that they read: [batch, query_heads, queries, kept].

    query: [batch, query_heads, queries, head_dim]; channels: [batch, heads, kept], heads divides query_heads.
    """
    return picked_channels(query, channels.repeat_interleave(query.shape[1] // channels.shape[1], dim=1))
