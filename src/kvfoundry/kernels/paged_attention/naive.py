"""Reference paged attention: gather the rows of the chosen pages, then attend to them."""

from typing import Any, Protocol

import torch
from torch import Tensor

from kvfoundry.kernels.attention import sdpa
from kvfoundry.visibility import Visibility


class Slots(Protocol):
    """Rows by slot number: [slots, dim] asked for [batch, heads, n] gives [batch, heads, n, dim]."""

    def __getitem__(self, slots: Any, /) -> Tensor: ...


def attend(
    query: Tensor,
    keys: Slots,
    values: Slots,
    pages: Tensor,
    starts: Tensor,
    lengths: Tensor,
    page: int,
    real: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention output [batch, query_heads, value_dim] of one query per sequence.

    query: [batch, query_heads, head_dim]; keys, values: [slots, dim], all heads of all sequences in one buffer, a
    tensor or whatever is read by slot numbers like one.
    pages: [batch, heads, widest] page numbers of each head, -1 for none; heads divides query_heads.
    starts, lengths: [batch, heads] first slot and number of rows of each head; page p of a head is its rows p * page to
    (p + 1) * page, as far as there are rows. real: [batch] boolean, False for padding (the output means nothing).
    """
    offset = torch.arange(page, device=pages.device)
    rows = (pages[..., None] * page + offset).flatten(-2)
    present = (rows >= 0) & (rows < lengths[..., None]) & (pages >= 0).repeat_interleave(page, dim=-1)
    slots = torch.where(present, starts[..., None] + rows, 0)
    visibility = Visibility(
        torch.where(real, 0, -1)[:, None],
        torch.where(present, 0, -1),
        "full" if bool(present.all()) else "masked",
    )
    output = sdpa.attend(
        query[:, :, None], keys[slots], values[slots], visibility, scaling=scaling, softcap=softcap, sinks=sinks
    )
    return output[:, :, 0]
