"""Quest: keep every row, read only the pages that promise most to the query."""

from kvfoundry.checks import choice, whole
from kvfoundry.errors import SpecError
from kvfoundry.method import Piece
from kvfoundry.reading.reader import PageReader
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, checked_amount


@register(
    paper="Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv 2406.10774",
    axes={"read": "pages with the best bound on q.k, in decode; nothing is dropped, so no memory is saved"},
    evicts=False,
)
def quest(
    budget: Amount,
    page: int = 16,
    skip_layers: int = 2,
    rule: str = "kernel",
    recent: int = 16,
    granularity: str = "kv_head",
    group: str = "max",
) -> Piece:
    """Read, in decode, at most `budget` rows per head: the pages whose keys can agree most with the query.

    score(page) = sum over channels d of max(q_d min_d, q_d max_d), min and max over the keys of the page: an upper
    bound of q.k. All rows stay stored, and the bounds come on top: nothing is saved in memory, only in reading. The
    prompt and the first `skip_layers` layers read everything, and so does every step while the budget covers all rows.
    Alone or on top of a method that drops rows: snapkv(budget=1024)+quest(budget=256) reads pages of what was kept.

    rule: "kernel", of Quest's kernels, always reads the last page, which counts in the budget, and at least one other.
    "evaluation", of its evaluation code, lets all pages compete and reads at least 3. "tokens", KVCache-Factory's,
    reads the newest `recent` rows and exactly as many others as the budget leaves, cut at the newest end; `recent` is
    for this rule only.
    granularity: "kv_head" reads one set of pages per KV head, for its query heads together, by the `group` reduction of
    their scores; "query_head", as in the paper's code and wherever the stored rows differ by query head, one for each.
    """
    checked_amount(budget)
    whole("page", page, least=1)
    whole("skip_layers", skip_layers)
    whole("recent", recent)
    choice("rule", rule, ("kernel", "evaluation", "tokens"))
    choice("granularity", granularity, ("kv_head", "query_head"))
    choice("group", group, ("mean", "max", "sum"))
    if isinstance(budget, int) and page > budget:
        raise SpecError(f"quest: a page of {page} rows does not fit a budget of {budget}; make the page smaller.")
    return Piece(read=PageReader(budget, page, skip_layers, rule, recent, granularity, group))  # type: ignore[arg-type]
