"""KVzip: the rows that the model needs to repeat its own context."""

from kvfoundry.checks import choice, whole
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.pool import PooledHeads
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.schedule import Schedule
from kvfoundry.selection.scores.reconstruction import Reconstruction, ReconstructionAttention


@register(
    paper="KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv 2505.23416",
    axes={
        "score": "largest attention received while the context is repeated",
        "budget": "one pool over the heads of all layers, of a layer, or uniform (`scope`)",
        "protect": "first `sinks` tokens",
        "schedule": "a second pass after the whole prompt",
    },
    group="max",
)
def kvzip(budget: Amount, chunk: int = 2000, overlap: int = 8, sinks: int = 4, scope: str = "model") -> Piece:
    """Keep the rows that serve to reconstruct the context, whatever will be asked of it.

    After the prompt the model is asked to repeat it, `chunk` tokens at a time, and reads the right answer along
    (teacher forcing), with the last `overlap` tokens of the previous chunk as the cue. For row j of chunk c,
    score(j) = max over the pass's queries i, and over the group's query heads, of softmax(q_i k / sqrt(d))_j, the
    softmax running over the first `sinks` rows, the rows of c, and the pass's own rows; none of the latter are stored.

    scope: who shares the budget (rows per head on average): "model" and "layer" pool heads, so that heads keep unequal
    numbers of rows, in the ragged layout ("model" is the paper's), "head" keeps the same number in every head.
    The pass needs the prompt's token ids: `kvfoundry.generate` and `kvfoundry.prefill` run it by themselves; with
    `model.generate` call `kvfoundry.compress_by_reconstruction` after the prompt. It costs about one more prefill.
    """
    checked_amount(budget)
    whole("chunk", chunk, least=1)
    whole("overlap", overlap)
    whole("sinks", sinks)
    choice("scope", scope, ("model", "layer", "head"))
    return Piece(
        score=ReconstructionAttention(),
        budget=UniformBudget(budget),
        heads=None if scope == "head" else PooledHeads(),
        protect=Protect(sinks=sinks),
        schedule=Schedule(prefill="never"),
        reconstructs=Reconstruction(chunk, overlap, sinks, scope),  # type: ignore[arg-type]
    )
