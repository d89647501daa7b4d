"""NaCl: rows that proxy tokens attend to, and some of the others by lot."""

from kvfoundry.checks import whole
from kvfoundry.errors import SpecError
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.choose import TopThenSampled
from kvfoundry.selection.draws import HashedDraws
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.scores.summed_window import SummedWindowAttention


@register(
    paper="NACL: A General and Effective KV Cache Eviction Framework for LLMs at Inference Time, arXiv 2408.03675",
    axes={
        "score": "attention of the proxy tokens",
        "budget": "uniform",
        "choose": "the best rows, then some by lot",
        "protect": "the proxy tokens, first `sinks` tokens",
        "schedule": "prompt",
    },
)
def nacl(
    budget: Amount,
    proxies: int = 32,
    random: int | float = 0.35,
    temperature: float = 1.0,
    sinks: int = 4,
    seed: int = 0,
) -> Piece:
    """Keep the rows that the last `proxies` tokens attend to, a random part of the rest, the proxies and the sinks.

    score(j) = group(sum over the proxy queries i of softmax(q_i k / sqrt(d))_j). Of the rows that are not protected the
    best stay, except for the random part: `random` rows (int), or that share of the budget (float; 7 of 20 in the
    authors' scripts), drawn without replacement with weight softmax(score / temperature); temperature 0 draws evenly.
    A draw depends on seed, layer, head and token index, never on the batch.

    Proxies are the end of the prompt, where the question stands. Queries at its beginning, which KVCache-Factory offers
    too ("edges", "prefix"), see no row behind themselves: they only protect their own rows, which `sinks` does.
    """
    checked_amount(budget)
    whole("proxies", proxies, least=1)
    whole("sinks", sinks)
    whole("seed", seed)
    if isinstance(random, bool) or not isinstance(random, (int, float)) or random < 0 or random != random:
        raise SpecError(f"nacl: random must be a number of rows (int) or a share in [0, 1] (float), got {random!r}.")
    if isinstance(random, float) and random > 1:
        raise SpecError(f"nacl: random={random} is not a share in [0, 1]; write an int for a number of rows.")
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not temperature >= 0:
        raise SpecError(f"nacl: temperature must be a number of at least 0, got {temperature!r}.")
    return Piece(
        score=SummedWindowAttention(proxies),
        budget=UniformBudget(budget),
        choose=TopThenSampled(random, float(temperature), HashedDraws(seed)) if random else None,
        protect=Protect(sinks=sinks, recent=proxies),
    )
