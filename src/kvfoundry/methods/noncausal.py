"""Non-causal chunk attention: rows that their neighbourhood attends to, before and after."""

from kvfoundry.checks import flag, whole
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.scores.chunk_attention import ChunkAttention


@register(
    paper="Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores, "
    "arXiv 2507.08143",
    axes={
        "score": "attention inside chunks without causality, times the value norm",
        "budget": "uniform",
        "schedule": "prompt",
    },
)
def noncausal(budget: Amount, chunk: int = 256, padded: bool = False) -> Piece:
    """Keep the rows that the other tokens of their chunk attend to, later keys included.

    score(j) = avgpool_3(group(sum over queries i of j's chunk of softmax over the chunk of q_i k)_j ||v_j||), without
    1/sqrt(d), as published. Chunks of `chunk` tokens are counted from the first token of each call.

    padded: kvpress' NonCausalAttention fills a short last chunk with zero rows that take part in the softmax; that is
    padded=True. Its normalisation over batch and heads has no effect on the order inside a head and is left out.
    """
    checked_amount(budget)
    whole("chunk", chunk, least=1)
    flag("padded", padded)
    return Piece(score=ChunkAttention(chunk, padded), budget=UniformBudget(budget))
