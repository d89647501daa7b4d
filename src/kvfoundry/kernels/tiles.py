"""One tile of rows in flash attention: its logits, and what they add to the running softmax of a tile of queries.

Kernels say which rows these are and who sees them; what is done with them is the same everywhere.
"""

from __future__ import annotations

from kvfoundry.kernels.splitting import online, soften
from kvfoundry.kernels.triton_support import tl, triton


@triton.jit
def logits_of(
    q,
    k_base,
    n,
    there,
    k_row,
    scaling,
    softcap,
    PARTIAL: tl.constexpr,
    KEY_DIM: tl.constexpr,
    DK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What queries q [queries, DK] give to rows n, in base 2. PARTIAL: some rows may not be `there`."""
    dk = tl.arange(0, DK)
    inside = (dk < KEY_DIM)[:, None]
    if PARTIAL:
        inside = inside & there[None, :]
    k = tl.load(k_base + n[None, :] * k_row + dk[:, None], mask=inside, other=0.0)
    return soften(tl.dot(q, k, input_precision=PRECISION), scaling, softcap, SOFTCAP)


@triton.jit
def taken_in(
    acc,
    peak,
    total,
    logits,
    v_base,
    n,
    there,
    v_row,
    PARTIAL: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(acc, peak, total) after rows n with these logits, -inf where a query does not see one."""
    weights, peak, total, fade = online(logits, peak, total)
    dv = tl.arange(0, DV)
    inside = (dv < VALUE_DIM)[None, :]
    if PARTIAL:
        inside = inside & there[:, None]
    v = tl.load(v_base + n[:, None] * v_row + dv[None, :], mask=inside, other=0.0)
    return tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION), peak, total


@triton.jit
def with_sink(acc, peak, total, sink):
    """(acc, peak, total) after a logit without a row, which has seen at least this one."""
    sink = sink.to(tl.float32) * 1.4426950408889634
    highest = tl.maximum(peak, sink)
    fade = tl.exp2(peak - highest)
    return acc * fade[:, None], highest, total * fade + tl.exp2(sink - highest)
