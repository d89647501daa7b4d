"""Prompt attention over an index in Triton: a program for each tile of queries, which reads nothing but its rows.

Flash attention in two loops: over the blocks that the index lists, nearest first, so that only the blocks of the tile
itself need a mask; then over single rows, gathered in tiles, without those whose block was read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.sparse_prefill.index import BlockIndex
from kvfoundry.kernels.tiles import logits_of, taken_in, with_sink
from kvfoundry.kernels.triton_support import Tuning, check_device, dot_precision, launches, next_power, tl, triton

# The block is that of the index; here it is the width of a tile of single rows.
DEFAULT = Tuning(block=64, warps=8, stages=3)


@triton.jit
def _read_blocks(
    acc,
    peak,
    total,
    q,
    k_base,
    v_base,
    distances,
    own,
    top,
    everything,
    start,
    stop,
    length,
    width,
    scaling,
    softcap,
    k_row,
    v_row,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    ahead = tl.load(distances + tl.minimum(start, width - 1))
    for entry in range(start, stop):
        n = (top - tl.where(everything, entry, ahead)) * BLOCK + tl.arange(0, BLOCK)
        # one entry early, so that the copies of rows do not wait for it
        ahead = tl.load(distances + tl.minimum(entry + 1, width - 1))
        logits = logits_of(
            q, k_base, n, n < length, k_row, scaling, softcap, MASKED, KEY_DIM, DK, SOFTCAP, PRECISION
        )  # fmt: skip
        if MASKED:
            logits = tl.where(n[None, :] <= own[:, None], logits, float("-inf"))
        acc, peak, total = taken_in(
            acc, peak, total, logits, v_base, n, n < length, v_row, MASKED, VALUE_DIM, DV, PRECISION
        )  # fmt: skip
    return acc, peak, total


# Numbers that change with the length of the text: a kernel for each of their kinds would be compiled in mid-prompt.
@triton.jit(do_not_specialize=["number", "width", "most", "d_owner", "d_tile"])
def _attend(
    query,
    key,
    value,
    sinks,
    output,
    lengths,
    queries,
    distances,
    counts,
    columns,
    column_counts,
    single,
    query_heads,
    number,
    width,
    most,
    scaling,
    softcap,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    o_batch,
    o_head,
    o_row,
    d_owner,
    d_tile,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # the last queries see most: they start first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    owner = tl.program_id(1).to(tl.int64)
    batch = owner // query_heads
    query_head = owner % query_heads
    head = query_head // GROUP
    stored = batch * (query_heads // GROUP) + head
    length = tl.load(lengths + stored).to(tl.int32)
    own_queries = tl.load(queries + batch).to(tl.int32)
    first = length - own_queries
    begin = (first // QUERY_BLOCK + tile) * QUERY_BLOCK
    top = (begin + QUERY_BLOCK) // BLOCK - 1
    own = begin + tl.arange(0, QUERY_BLOCK)
    i = own - first
    real = (i >= 0) & (i < own_queries)
    dk = tl.arange(0, DK)
    dv = tl.arange(0, DV)
    q = tl.load(
        query + batch * q_batch + query_head * q_head + i.to(tl.int64)[:, None] * q_row + dk[None, :],
        mask=real[:, None] & (dk < KEY_DIM)[None, :],
        other=0.0,
    )
    peak = tl.full([QUERY_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_BLOCK], tl.float32)
    acc = tl.zeros([QUERY_BLOCK, DV], tl.float32)
    k_base = key + batch * k_batch + head * k_head
    v_base = value + batch * v_batch + head * v_head
    count = tl.load(counts + owner * number + tile)
    everything = count == top + 1
    listed = distances + owner * d_owner + tile * d_tile
    border = tl.minimum(count, QUERY_BLOCK // BLOCK)
    acc, peak, total = _read_blocks(
        acc,
        peak,
        total,
        q,
        k_base,
        v_base,
        listed,
        own,
        top,
        everything,
        0,
        border,
        length,
        width,
        scaling,
        softcap,
        k_row,
        v_row,
        True,
        BLOCK,
        KEY_DIM,
        VALUE_DIM,
        DK,
        DV,
        SOFTCAP,
        PRECISION,
    )
    acc, peak, total = _read_blocks(
        acc,
        peak,
        total,
        q,
        k_base,
        v_base,
        listed,
        own,
        top,
        everything,
        border,
        count,
        length,
        width,
        scaling,
        softcap,
        k_row,
        v_row,
        False,
        BLOCK,
        KEY_DIM,
        VALUE_DIM,
        DK,
        DV,
        SOFTCAP,
        PRECISION,
    )
    if COLUMNS:
        singles = tl.load(column_counts + owner * number + tile)
        columns += owner * most
        single += (owner * number + tile) * most
        c = tl.arange(0, GATHER)
        ahead = tl.load(columns + c, mask=c < singles, other=0)
        for start in range(0, singles, GATHER):
            n = ahead
            c = start + tl.arange(0, GATHER)
            ahead = tl.load(columns + GATHER + c, mask=GATHER + c < singles, other=0)
            take = tl.load(single + c, mask=c < singles, other=0) != 0
            inside = n < length
            logits = logits_of(
                q, k_base, n, inside, k_row, scaling, softcap, True, KEY_DIM, DK, SOFTCAP, PRECISION
            )  # fmt: skip
            logits = tl.where(take[None, :] & (n[None, :] <= own[:, None]), logits, float("-inf"))
            acc, peak, total = taken_in(
                acc, peak, total, logits, v_base, n, inside, v_row, True, VALUE_DIM, DV, PRECISION
            )  # fmt: skip
    if HAS_SINKS:
        acc, peak, total = with_sink(acc, peak, total, tl.load(sinks + query_head))
    divisor = tl.where(total > 0.0, total, 1.0)
    at = output + batch * o_batch + query_head * o_head + i.to(tl.int64)[:, None] * o_row + dv[None, :]
    result = (acc / divisor[:, None]).to(output.dtype.element_ty)
    tl.store(at, result, mask=real[:, None] & (dv < VALUE_DIM)[None, :])


@launches
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: BlockIndex,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tuning: Tuning = DEFAULT,
) -> Tensor:
    """As `naive.attend`. Tiles and blocks of the index are powers of two of at least 16."""
    check_device(query, key, value, index.distances, index.columns, index.tiles.lengths, sinks)
    tiles = index.tiles
    for name, size in (("tiles of queries", tiles.query_block), ("blocks of rows", tiles.key_block)):
        if size < 16 or size & (size - 1):
            raise KVFoundryError(f"the kernel takes {name} whose size is a power of two of at least 16, not {size}.")
    if query.shape[1] % key.shape[1]:
        raise KVFoundryError(f"{query.shape[1]} query heads cannot share {key.shape[1]} stored heads evenly.")
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        raise KVFoundryError("the last dimension of queries and rows must be dense.")
    batch, query_heads, queries, key_dim = query.shape
    heads, value_dim = key.shape[1], value.shape[3]
    # what a shorter batch row has no query for stays zero
    empty = torch.empty if tiles.even else torch.zeros
    output = empty(batch, query_heads, queries, value_dim, dtype=query.dtype, device=query.device)
    distances, columns = index.distances, index.columns.contiguous()
    tall, width = distances.shape[2:]
    if distances.stride(3) != 1 or distances.stride(0) != query_heads * distances.stride(1):
        distances = distances.contiguous()
    _attend[(tiles.number, batch * query_heads)](
        query,
        key,
        value,
        output if sinks is None else sinks,
        output,
        tiles.lengths.contiguous(),
        tiles.counts,
        distances,
        index.counts.contiguous(),
        columns,
        index.column_counts.contiguous(),
        index.single.contiguous().view(torch.uint8),
        query_heads,
        tiles.number,
        width,
        columns.shape[2],
        scaling,
        softcap or 1.0,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *output.stride()[:3],
        distances.stride(1),
        distances.stride(2) if tall > 1 else 0,
        GROUP=query_heads // heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        DK=next_power(key_dim, 16),
        DV=next_power(value_dim, 16),
        QUERY_BLOCK=tiles.query_block,
        BLOCK=tiles.key_block,
        GATHER=tuning.block,
        COLUMNS=columns.shape[2] > 0,
        SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        PRECISION=dot_precision(query.dtype),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    return output
