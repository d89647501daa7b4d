"""HeadInfer: every row in host memory, on the device one head at a time."""

from kvfoundry.checks import whole
from kvfoundry.layouts.placement import HeadStreaming
from kvfoundry.method import Piece
from kvfoundry.registry import register


@register(
    paper="HeadInfer: Memory-Efficient LLM Inference by Head-wise Offloading, arXiv 2502.12574",
    axes={"placement": "host memory, streamed to the device `group` heads at a time; exact"},
    evicts=False,
)
def headinfer(group: int = 1) -> Piece:
    """Keep the rows in host memory and copy them to the device head by head, ahead of the attention that reads them.

    Nothing is dropped or rounded: the text is that of the full cache. The device holds three buffers for `group` heads
    each, for all layers together, and up to 64 new rows of every layer; the rest is in pinned host memory
    (`cache.host_nbytes`). While one buffer is read, the next ones are filled, also across layers and steps, so a step
    takes as long as the link needs for all rows. With a codec packed codes cross the link, with an evicting method what
    it keeps, with quest the chosen pages alone:
    headinfer()+kivi(bits=2), snapkv(budget=16384)+headinfer(), quest(budget=4096)+headinfer(). In the engine the copies
    are part of its CUDA graph, and rows that are decoded stay on the device until it ends.

    group: KV heads that are copied and read together; more of them take more memory and fewer launches. Methods that
    look at all rows in decode (h2o, say) bring a whole layer back at every look: right, and slow.
    """
    whole("group", group, least=1)
    return Piece(placement=HeadStreaming(group))
