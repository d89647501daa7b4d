"""ThinK: keys without the channels that the queries do not ask for."""

from kvfoundry.checks import choice, number, whole
from kvfoundry.codecs.think import KeyChannels
from kvfoundry.errors import SpecError
from kvfoundry.method import Piece
from kvfoundry.registry import register


@register(
    paper="ThinK: Thinner Key Cache by Query-Driven Pruning, arXiv 2407.21018",
    axes={"codec": "keys in the channels that the end of the prompt asks for, newest rows whole; values whole"},
    evicts=False,
)
def think(
    ratio: float = 0.5, window: int = 32, recent: int = 32, block: int = 32, granularity: str = "kv_head"
) -> Piece:
    """Drop the share `ratio` of the key channels: those that the last `window` queries of the prompt read least.

    score_d = mean over the window and the query heads of a group of q_d^2, times the mean over the stored rows of
    k_d^2; the int(head_dim ratio) channels with the lowest scores go. q k is then a sum over the channels that stay.
    Values stay whole, and so do the newest `recent` rows; in decode they wait until `block` more are there, which then
    lose the same channels. On top of a method that drops rows the scores are those of the rows that it leaves, as in
    the authors' code: snapkv(budget=1024)+think(ratio=0.5). recent=0 prunes the whole prompt, as kvpress does.

    granularity: "kv_head" has one set of channels per KV head, "query_head", of the authors' code, one per query head,
    at the price of a stored row for each.
    """
    number("ratio", ratio, least=0, most=1)
    if ratio == 1:
        raise SpecError("think: ratio must be below 1: a key needs at least one channel.")
    whole("window", window, least=1)
    whole("recent", recent)
    whole("block", block, least=1)
    choice("granularity", granularity, ("kv_head", "query_head"))
    return Piece(codec=KeyChannels(float(ratio), window, recent, block, granularity))  # type: ignore[arg-type]
