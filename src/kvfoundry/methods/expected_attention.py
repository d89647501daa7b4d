"""Expected Attention: the attention that rows will receive from queries to come."""

from kvfoundry.checks import whole
from kvfoundry.errors import SpecError
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.budgets import Amount, UniformBudget, checked_amount
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.scores.expected_attention import ExpectedAttention


@register(
    paper="Expected Attention: KV Cache Compression by Estimating Attention from Future Queries, arXiv 2510.00636",
    axes={
        "score": "expected attention of future queries times the value norm",
        "budget": "uniform",
        "protect": "first `sinks` tokens",
        "schedule": "prompt",
    },
)
def expected_attention(
    budget: Amount,
    future: int = 512,
    sinks: int = 4,
    covariance: bool = True,
    value_norm: bool = True,
    epsilon: float = 0.0,
) -> Piece:
    """Keep the rows that queries at the next `future` positions would attend to, if queries stay distributed as before.

    With mu, C the mean and covariance of the queries before RoPE and R the mean rotation of the positions ahead,
    z(j) = (R mu).k_j / sqrt(d) + k_j' R C R' k_j / (2 d); score(j) = (group(softmax(z)_j) + epsilon) ||v_j||, the
    softmax over all rows behind the sinks. The logarithm of the mean of exp of a Gaussian is where z comes from.

    covariance=False leaves the second term out, value_norm=False the norm. Needs a model with RoPE.
    """
    checked_amount(budget)
    whole("future", future, least=1)
    whole("sinks", sinks)
    if not isinstance(epsilon, (int, float)) or isinstance(epsilon, bool) or not epsilon >= 0:
        raise SpecError(f"epsilon must be a number of at least 0, got {epsilon!r}.")
    return Piece(
        score=ExpectedAttention(future, sinks, bool(covariance), bool(value_norm), float(epsilon)),
        budget=UniformBudget(budget),
        protect=Protect(sinks=sinks),
    )
