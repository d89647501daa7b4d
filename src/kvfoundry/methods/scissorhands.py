"""Scissorhands: what was important stays important."""

from kvfoundry.checks import choice, whole
from kvfoundry.errors import SpecError
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.choose import TopThenSampled
from kvfoundry.selection.draws import HashedDraws
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.schedule import Schedule
from kvfoundry.selection.scores.persistence import AboveAverage, HistorySum


@register(
    paper="Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at Test "
    "Time, arXiv 2305.17118",
    axes={
        "score": "how often attention was above average in a history window",
        "budget": "uniform",
        "protect": "newest `recent` tokens, first `sinks` tokens",
        "schedule": "prompt, then every token",
    },
)
def scissorhands(
    budget: Amount,
    history: int | None = 32,
    recent: int = 10,
    sinks: int = 0,
    form: str = "count",
    decay: float = 1.0,
    selection: str = "top",
    temperature: float = 1.0,
    seed: int = 0,
) -> Piece:
    """Keep the rows that the queries of a history window seldom passed over, and the newest `recent`.

    form="count", the paper's: score(j) = -group(number of the last `history` queries i with a_ij < 1 / n_i), n_i the
    rows that query i sees, in prompt and decode; among equal counts the larger mean attention decides. The queries of
    the window are held in memory and look at the rows that are stored now. The paper's runs take a history of 400,
    which costs more memory than a small budget saves. The paper drops half of the budget whenever it is full; here the
    budget holds after every token, and schedule(every=N, cap=M) drops in strides.

    form="sum", KVCache-Factory's: a running importance, importance x decay + the attention of the last `history`
    queries of each call (None: of all).

    selection: "top" keeps the best rows; "sample" draws them without replacement with weight softmax(score /
    temperature). A draw depends on seed, layer, head and token index, never on the batch.
    """
    checked_amount(budget)
    choice("form", form, ("count", "sum"))
    choice("selection", selection, ("top", "sample"))
    if history is not None:
        whole("history", history, least=1)
    elif form == "count":
        raise SpecError("scissorhands: history=None counts over all queries, which only form='sum' can; give a number.")
    for name, value in (("recent", recent), ("sinks", sinks), ("seed", seed)):
        whole(name, value)
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
        raise SpecError(f"scissorhands: decay must be a number in [0, 1], got {decay!r}.")
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not temperature >= 0:
        raise SpecError(f"scissorhands: temperature must be a number of at least 0, got {temperature!r}.")
    return Piece(
        score=HistorySum(history, float(decay)) if form == "sum" else AboveAverage(int(history or 1)),
        budget=UniformBudget(budget),
        choose=TopThenSampled(1.0, float(temperature), HashedDraws(seed)) if selection == "sample" else None,
        protect=Protect(recent=recent, sinks=sinks),
        schedule=Schedule(every=1),
    )
