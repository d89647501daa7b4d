"""CaM: cache merging. What leaves the window is added, by lot, to the rows that stay."""

from kvfoundry.checks import choice, whole
from kvfoundry.errors import SpecError
from kvfoundry.merging.cam import CamMerge, CamPrefill
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.draws import HashedDraws
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.schedule import Schedule
from kvfoundry.selection.scores.recency import Recency
from kvfoundry.selection.scores.summed_window import SummedWindowAttention


@register(
    paper="CaM: Cache Merging for Memory-efficient LLMs Inference, ICML 2024",
    axes={
        "score": "token index",
        "budget": "uniform",
        "protect": "first `sinks` tokens",
        "dispose": "values into the recent rows, by lot",
        "schedule": "prompt, then every token",
    },
)
def cam(
    budget: Amount,
    sinks: int = 4,
    merge: int = 32,
    seed: int = 0,
    form: str = "paper",
    window: int = 8,
    start: float = 0.1,
) -> Piece:
    """Keep the first `sinks` and the newest tokens, and merge the value of a token that leaves into those that stay.

    form="paper": rows of the prompt beyond the budget are dropped. In decode, the row i that leaves is merged with
    probability min(1, a_i / mean(a_j over the recent rows)), a the newest query's attention: v_j += v_i / merge for the
    next `merge` rows j. The authors' code merges a row two steps before it leaves; here it is merged when it leaves.

    form="prefill" is KVCache-Factory's: once after the prompt, every row from the share `start` on, in order and
    passing on what it took in, is spread over the next `window` rows with probability a_i / max(a of the first rows
    and of i ... i + window - 1), a the mean attention of the last `window` queries; then the rows with the most
    attention stay and the newest `window`. There `sinks` and `merge` play no part. That code also lets the prompt's own
    attention see the changed values; here the prompt is read as it was computed.

    A draw depends on seed, layer, head and token index, never on the batch.
    """
    checked_amount(budget)
    whole("sinks", sinks)
    whole("merge", merge, least=1)
    whole("seed", seed)
    whole("window", window, least=1)
    choice("form", form, ("paper", "prefill"))
    if isinstance(start, bool) or not isinstance(start, (int, float)) or not 0 <= start <= 1:
        raise SpecError(f"cam: start must be a share in [0, 1], got {start!r}.")
    if form == "paper":
        return Piece(
            score=Recency(),
            budget=UniformBudget(budget),
            protect=Protect(sinks=sinks),
            schedule=Schedule(every=1),
            dispose=CamMerge(merge, prompt=False, draws=HashedDraws(seed)),
        )
    return Piece(
        score=SummedWindowAttention(window, group_first=True),
        budget=UniformBudget(budget),
        protect=Protect(recent=window),
        schedule=Schedule(prefill="end"),
        dispose=CamPrefill(window, start, HashedDraws(seed)),
    )
