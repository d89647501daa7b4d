"""KVMerger's weighted merge: runs of similar keys become one row, with Gaussian weights."""

from kvfoundry.checks import choice
from kvfoundry.errors import SpecError
from kvfoundry.merging.weighted import WeightedMerge
from kvfoundry.method import Piece
from kvfoundry.registry import register


@register(
    paper="Model Tells You Where to Merge: Adaptive KV Cache Merging for LLMs on Long-Context Tasks, arXiv 2407.08454",
    axes={"dispose": "Gaussian weighted mean of runs of similar keys"},
    kind="piece",
)
def weighted_merge(form: str = "sets", threshold: float = 0.75, sigma: float | None = None) -> Piece:
    """Fold dropped rows into a kept row that is like them, weighted by likeness.

    form="sets", the paper's: a merging set is a run of neighbouring rows whose keys have a cosine of at least
    `threshold` from each to the next. Its pivot p is the kept row with the best score, and every dropped row i of the
    set joins it: k' = sum w_i k_i over the pivot and these rows, w_i = g_i / sum g, g_i = exp(-||k_p - k_i||^2 /
    (2 sigma^2)); the same weights for values. sigma: None takes the mean distance of these rows from the pivot. In the
    paper the threshold decides how many rows are left; here the budget does, so a set can keep several rows, and a set
    that keeps none is dropped.

    form="neighbour", KVCache-Factory's merge="weighted": every dropped row joins the kept row with the most similar
    key, wherever it is, with weight max((cosine + 1) / 2, 1e-6) to the target's 1; `threshold` and `sigma` play no
    part.
    """
    choice("form", form, ("sets", "neighbour"))
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not -1 <= threshold <= 1:
        raise SpecError(f"weighted_merge: threshold must be a cosine between -1 and 1, got {threshold!r}.")
    if sigma is not None and (isinstance(sigma, bool) or not isinstance(sigma, (int, float)) or not sigma > 0):
        raise SpecError(f"weighted_merge: sigma must be a distance above 0 or None, got {sigma!r}.")
    return Piece(dispose=WeightedMerge(form, threshold, sigma))  # type: ignore[arg-type]
