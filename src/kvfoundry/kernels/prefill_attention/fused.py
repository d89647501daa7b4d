"""Prompt attention with column sums in Triton, in memory linear in the tokens.

Two passes. The first is flash attention that keeps the log of every query's sum (`forward`); with it the second knows
any weight without having seen the others (`columns`).
"""

from __future__ import annotations

from torch import Tensor

from kvfoundry.kernels.prefill_attention import columns
from kvfoundry.kernels.prefill_attention.columns import COLUMNS, column_sums
from kvfoundry.kernels.prefill_attention.forward import FORWARD, QUERY_BLOCK, forward
from kvfoundry.kernels.prefill_attention.naive import Attended
from kvfoundry.kernels.triton_support import Tuning


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    last: int = 0,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    forward_tuning: Tuning = FORWARD,
    columns_tuning: Tuning = COLUMNS,
    query_block: int = QUERY_BLOCK,
    column_query_block: int = columns.QUERY_BLOCK,
) -> Attended:
    """As `naive.attend`. Only without positions are blocks that nobody sees left out."""
    output, lse = forward(
        query,
        key,
        value,
        scaling=scaling,
        query_positions=query_positions,
        key_positions=key_positions,
        softcap=softcap,
        sinks=sinks,
        window=window,
        tuning=forward_tuning,
        query_block=query_block,
    )
    sums, recent = column_sums(
        query,
        key,
        lse,
        scaling=scaling,
        last=last,
        query_positions=query_positions,
        key_positions=key_positions,
        softcap=softcap,
        window=window,
        tuning=columns_tuning,
        query_block=column_query_block,
    )
    return Attended(output, sums, recent)
