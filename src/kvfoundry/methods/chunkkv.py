"""ChunkKV: SnapKV's attention, chosen chunk by chunk so that phrases stay whole."""

from dataclasses import replace

from kvfoundry.method import Piece
from kvfoundry.methods.chunks import unit
from kvfoundry.methods.snapkv import snapkv
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformHeads


@register(
    paper="ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference, "
    "arXiv 2502.00299",
    axes={
        "score": "attention of the last `window` queries, pooled",
        "unit": "chunks of `chunk` tokens, the same in every head of a layer",
        "budget": "uniform",
        "protect": "the window",
        "schedule": "prompt",
    },
)
def chunkkv(
    budget: Amount, chunk: int = 10, window: int = 32, kernel: int = 1, pooling: str = "avg", rest: str = "fill"
) -> Piece:
    """Keep the chunks of `chunk` tokens that the end of the prompt attends to most, and the chunks of the window.

    score(chunk) = mean over its rows of the sum over heads of SnapKV's score; the best chunks stay, the same in every
    head. Chunks are counted from each sequence's own first token, and each row of a batch chooses for itself.
    rest: budget that holds no whole chunk goes to the beginning of the next one ("fill") or to nobody ("drop", the
    paper). `chunks(size)` does the same for any other score. The paper sums the window's attention without pooling
    (kernel=1); kvpress' ChunkKV over SnapKV is kernel=5. Sharing one layer's choice with its neighbours, an option of
    the paper, is not offered.
    """
    return replace(snapkv(budget, window, kernel, pooling), unit=unit(chunk, rest), heads=UniformHeads())
