"""A piece that refines any score by what the values become after the output projection."""

from kvfoundry.errors import SpecError
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.refine import ProjectedValues


@register(
    paper="Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective, arXiv 2502.03805",
    axes={"refine": "half the budget by score, half by score times projected value norm"},
    kind="piece",
)
def critical(first: float = 0.5, epsilon: float = 1e-4) -> Piece:
    """Fill the last part of every head's budget by (score + epsilon) times the L1 norm of the projected value.

    The best `first` share of the budget stays by score alone. Works with head-adaptive budgets: each head's share is
    settled by the plain score (CriticalAdaKV).
    """
    return Piece(refine=refinement(first, epsilon))


def refinement(first: object, epsilon: object) -> ProjectedValues:
    """The refinement, or SpecError for a share outside [0, 1] or a negative epsilon."""
    for name, value, top in (("first", first, 1.0), ("epsilon", epsilon, float("inf"))):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= top:
            raise SpecError(f"{name} must be a number of at least 0{' and at most 1' * (top == 1)}, got {value!r}.")
    return ProjectedValues(float(first), float(epsilon))  # type: ignore[arg-type]
