"""Column sums in Triton: once every query's log-sum-exp is known, no weight has to be stored."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvfoundry.kernels.prefill_attention import columns
from kvfoundry.kernels.prefill_attention.log_sums import log_sums
from kvfoundry.visibility import Visibility


def column_sums(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    **tunings: Any,
) -> Tensor:
    """As `naive.column_sums`, for masks without blocks of their own and without unread distances.

    lse: [batch, query_heads, queries] float32, the base-2 log of each query's sum (see `attention.remembering`);
    without it logits are computed once more to find it. tunings: those of `prefill_attention.columns.column_sums`.
    """
    where: dict[str, Any] = {}
    if visibility.pattern != "causal":
        positions = visibility.key_positions
        where = {
            "query_positions": visibility.query_positions,
            "key_positions": positions if positions.stride(-1) == 1 else positions.contiguous(),
            "window": visibility.rule.sliding,
        }
    terms = {"scaling": scaling, "softcap": softcap, **where}
    if lse is None:
        lse = log_sums(query, key, sinks=sinks, **terms)
    # a padded query gives nothing
    lse = lse.masked_fill(visibility.query_positions[:, None, :] < 0, float("inf")).contiguous()
    return columns.column_sums(query, key, lse, **terms, **tunings)[0]
