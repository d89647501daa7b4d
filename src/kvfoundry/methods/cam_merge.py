"""CaM's disposal for any evicting method: dropped values are added, by lot, to the rows that follow."""

from kvfoundry.checks import choice, whole
from kvfoundry.merging.cam import CamMerge
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection.draws import HashedDraws


@register(
    paper="CaM: Cache Merging for Memory-efficient LLMs Inference, ICML 2024",
    axes={"dispose": "values into the rows that follow, by lot"},
    kind="piece",
)
def cam_merge(merge: int = 32, form: str = "paper", most: int | None = None, seed: int = 0) -> Piece:
    """Add the value of a dropped row to the next `merge` kept rows, with a probability that grows with its attention.

    p = min(1, a_i / mean(a_j)), and when drawn v_j += v_i / merge for the next `merge` kept rows j.

    form="paper": a is the newest query's attention, the mean is over all kept rows behind i. form="kvpress" (CAMPress):
    a is summed over the decoded tokens, the mean is over the rows that would take the value, and it is divided by
    their number where fewer than `merge` follow; there `most` is the compression interval and decode alone evicts:
    +schedule(prefill='never', every=N, cap=B).

    most: merge only so many of the rows dropped at once, those with the best scores; None merges all.
    """
    whole("merge", merge, least=1)
    choice("form", form, ("paper", "kvpress"))
    if most is not None:
        whole("most", most, least=1)
    whole("seed", seed)
    if form == "paper":
        return Piece(dispose=CamMerge(merge, most=most, draws=HashedDraws(seed)))
    return Piece(dispose=CamMerge(merge, "sum", "merged", "count", most, draws=HashedDraws(seed)))
