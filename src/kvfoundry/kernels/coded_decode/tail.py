"""Attention over a head's newest rows, which are not coded yet."""

from __future__ import annotations

from kvfoundry.kernels.splitting import online, soften, store_part
from kvfoundry.kernels.triton_support import tl, triton


@triton.jit
def attend_tail(
    query,
    keys,
    values,
    parts,
    part_lse,
    program,
    head,
    start,
    stop,
    count,
    scaling,
    softcap,
    q_head,
    q_query,
    k_row,
    v_row,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    M: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows start .. stop of the `count` of a stored head, as part number `program`; query: that of its batch."""
    m = tl.arange(0, M)
    real = m < GROUP * QUERIES
    number = m % (GROUP * QUERIES) // GROUP
    own = count - QUERIES + number
    dk = tl.arange(0, DK)
    dv = tl.arange(0, DV)
    at = query + (head * GROUP + m % GROUP) * q_head + number * q_query
    asked = tl.load(at[:, None] + dk[None, :], mask=real[:, None] & (dk < KEY_DIM)[None, :], other=0.0)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DV], tl.float32)
    # few rows: no tiles in flight, which would take the shared memory of other programs
    for begin in tl.range(start, stop, BLOCK, num_stages=1):
        n = begin + tl.arange(0, BLOCK)
        there = n < stop
        inside = there[None, :] & (dk < KEY_DIM)[:, None]
        k = tl.load(keys + n[None, :] * k_row + dk[:, None], mask=inside, other=0.0)
        logits = soften(tl.dot(asked, k, input_precision=PRECISION), scaling, softcap, SOFTCAP)
        logits = tl.where(there[None, :] & (n[None, :] <= own[:, None]), logits, float("-inf"))
        weights, peak, total, fade = online(logits, peak, total)
        inside = there[:, None] & (dv < VALUE_DIM)[None, :]
        v = tl.load(values + n[:, None] * v_row + dv[None, :], mask=inside, other=0.0)
        acc = tl.dot(weights.to(asked.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    store_part(parts, part_lse, program, acc, peak, total, GROUP * QUERIES, M, VALUE_DIM, DV)
