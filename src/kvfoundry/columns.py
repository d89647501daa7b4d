"""Taking padding columns out of a call, and putting outputs back where they belong."""

from torch import Tensor


def picked_columns(tensor: Tensor, gather: Tensor) -> Tensor:
    """Columns `gather` [batch, width] of [batch, heads, tokens, dim]."""
    return tensor.gather(2, gather[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3]))


def restored_columns(output: Tensor, gather: Tensor, positions: Tensor, columns: int) -> Tensor:
    """Outputs of compacted tokens back in their columns, zeros where there was padding."""
    real = (positions >= 0)[:, None, :, None]
    index = gather[:, None, :, None].expand(-1, output.shape[1], -1, output.shape[3])
    restored = output.new_zeros(output.shape[0], output.shape[1], columns, output.shape[3])
    return restored.scatter(2, index, output * real)


def newest(query: Tensor, positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` queries of every sequence with the highest positions, padding in front.

    query: [batch, query_heads, tokens, head_dim]; positions: [batch, tokens], -1 for padding. Both are copied, so that
    nothing keeps the storage of a whole call.
    """
    # nothing is asked of the device here, whatever the padding: it would have to finish what it is doing
    order = positions.topk(min(size, positions.shape[1])).indices.flip(1)
    return picked_columns(query, order), positions.gather(1, order)
