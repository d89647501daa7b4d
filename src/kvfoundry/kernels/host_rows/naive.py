"""Reference gather of rows that lie in host memory."""

from __future__ import annotations

from torch import Tensor


def gather(host: Tensor, index: Tensor, first: Tensor, used: Tensor, out: Tensor) -> None:
    """Write row `index - first` of every head to `out` where it lies between 0 and `used`; leave the rest alone.

    host: [batch, heads, room, ...] in host memory; first, used: [batch, heads], integers. index: [batch, heads, n] and
    out: [batch, heads, n, ...], contiguous, where the result is wanted.
    """
    at = (index - first.to(index.device)[..., None]).cpu()
    there = (at >= 0) & (at < used.cpu()[..., None])
    batch, head, number = there.nonzero(as_tuple=True)
    found = host[batch, head, at[batch, head, number]]
    batch, head, number = (tensor.to(out.device) for tensor in (batch, head, number))
    out[batch, head, number] = found.to(out.device)
