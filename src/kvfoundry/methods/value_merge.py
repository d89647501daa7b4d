"""Value folding: dropped values live on in the kept row with the most similar key."""

from kvfoundry.errors import SpecError
from kvfoundry.merging.value import ValueMerge
from kvfoundry.method import Piece
from kvfoundry.registry import register


@register(
    paper="kvpress, MergingPress",
    axes={"dispose": "values into the kept row with the most similar key"},
    kind="piece",
)
def value_merge(threshold: float = 0.0, fraction: float = 1.0) -> Piece:
    """Fold the value of every dropped row into the kept row with the most similar key; keys stay as they are.

    v' = (v + sum w v_dropped) / (1 + sum w) with w = max(cosine, 0) ||v_dropped|| / (||v_dropped|| + ||v|| + 1e-6).
    threshold: rows whose best cosine is below it are dropped for good. fraction: of each head's dropped rows, only
    those at or above the (1 - fraction) quantile of that cosine are folded.
    """
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not -1 <= threshold <= 1:
        raise SpecError(f"value_merge: threshold must be a cosine between -1 and 1, got {threshold!r}.")
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
        raise SpecError(f"value_merge: fraction must be a share in (0, 1], got {fraction!r}.")
    return Piece(dispose=ValueMerge(threshold, fraction))
