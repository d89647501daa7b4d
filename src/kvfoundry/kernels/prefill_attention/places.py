"""Who sees whom in a prompt: token indices of rows and queries, given or counted, and which tensors go together."""

from __future__ import annotations

from torch import Tensor

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.triton_support import check_device, tl, triton


@triton.jit
def token_of(n, k_positions, rows, POSITIONS: tl.constexpr):
    """Token index of rows; beyond every query where there is none."""
    if POSITIONS:
        at = tl.load(k_positions + n, mask=n < rows, other=-1).to(tl.int32)
        return tl.where(at < 0, 2147483647, at)
    return tl.where(n < rows, n, 2147483647)


@triton.jit
def sees(at, own, WINDOW: tl.constexpr):
    """Who sees whom, for token indices of rows and queries that broadcast against each other."""
    if WINDOW > 0:
        return (at <= own) & (at > own - WINDOW)
    return at <= own


@triton.jit
def queries_of(
    query,
    q_positions,
    i,
    batch,
    query_head,
    queries,
    distance,
    q_batch,
    q_head,
    q_row,
    qp_batch,
    KEY_DIM: tl.constexpr,
    DK: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Queries i of one head [len(i), DK], and their token indices."""
    dk = tl.arange(0, DK)
    q = tl.load(
        query + batch * q_batch + query_head * q_head + i[:, None] * q_row + dk[None, :],
        mask=(i < queries)[:, None] & (dk < KEY_DIM)[None, :],
        other=0.0,
    )
    if POSITIONS:
        own = tl.load(q_positions + batch * qp_batch + i, mask=i < queries, other=-1).to(tl.int32)
    else:
        own = distance + i
    return q, own


def position_strides(query_positions: Tensor | None, key_positions: Tensor | None) -> tuple[int, int, int]:
    if query_positions is None or key_positions is None:
        return 0, 0, 0
    head = 0 if key_positions.shape[1] == 1 else key_positions.stride(1)
    return query_positions.stride(0), key_positions.stride(0), head


def check(
    query: Tensor, key: Tensor, value: Tensor, query_positions: Tensor | None, key_positions: Tensor | None
) -> None:
    check_device(query, key, value, query_positions, key_positions)
    if (query_positions is None) != (key_positions is None):
        raise KVFoundryError("positions are given for queries and rows, or for neither.")
    if query_positions is None and key.shape[2] < query.shape[2]:
        raise KVFoundryError("without positions the queries are the last rows: there are fewer rows than queries.")
    if query.shape[1] % key.shape[1]:
        raise KVFoundryError(f"{query.shape[1]} query heads cannot share {key.shape[1]} stored heads evenly.")
    dense = [tensor for tensor in (query, key, value, query_positions, key_positions) if tensor is not None]
    if any(tensor.stride(-1) != 1 for tensor in dense):
        raise KVFoundryError("the last dimension of queries, rows and positions must be dense.")
