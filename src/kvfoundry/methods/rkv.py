"""R-KV: rows that are attended to and not said again elsewhere, for long reasoning."""

from kvfoundry.checks import whole
from kvfoundry.errors import SpecError
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.pooling import checked_kernel
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.schedule import Schedule
from kvfoundry.selection.scores.redundancy import ImportanceMinusRedundancy


@register(
    paper="R-KV: Redundancy-aware KV Cache Compression for Reasoning Models, arXiv 2505.24133",
    axes={
        "score": "attention of the last `window` queries minus likeness to other keys",
        "budget": "uniform",
        "protect": "the window",
        "schedule": "prompt, then every `buffer` tokens",
    },
    group="max",
)
def rkv(
    budget: Amount,
    window: int = 8,
    kernel: int = 7,
    weight: float = 0.1,
    threshold: float = 0.5,
    buffer: int = 128,
) -> Piece:
    """Keep rows by attention minus redundancy; during decode act every `buffer` tokens.

    I(j) = maxpool_kernel(group(mean over the window's queries of softmax over earlier rows of q k / sqrt(d)));
    R(j) = softmax over rows of the mean over i of cos(k_i, k_j), where each row i leaves out the newest key with
    cos > threshold, so that the latest of several like rows survives; score(j) = weight I(j) - (1 - weight) R(j).
    Cosines are taken block by block; no matrix of tokens by tokens is stored.

    weight: 0.1 in the paper (its code's class default is 0.07). The code takes the maximum over the group of logits,
    we reduce the weights by `group` (default max), and where no key resembles a row it leaves out the first one, we
    leave out none. Between evictions up to budget + buffer rows are stored.
    """
    checked_amount(budget)
    checked_kernel(window, kernel)
    whole("buffer", buffer, least=1)
    for name, value in (("weight", weight), ("threshold", threshold)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
            raise SpecError(f"{name} must be a number from 0 to 1, got {value!r}.")
    return Piece(
        score=ImportanceMinusRedundancy(window, kernel, float(weight), float(threshold)),
        budget=UniformBudget(budget),
        protect=Protect(recent=window),
        schedule=Schedule(every=buffer),
    )
