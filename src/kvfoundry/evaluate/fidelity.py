"""How far a method moves the model's next-token distributions from those of the full cache, under teacher forcing.

The method acts on the beginning of a text. The rest is then fed in decode form, token by token or in small pieces, and
whatever the model would have said is compared with what it says over the full cache: nothing that was said feeds back.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfoundry import compat
from kvfoundry.cache import KVCache
from kvfoundry.devices import input_device
from kvfoundry.generation import read_prompt
from kvfoundry.kept import Kept, kept_by_row


@dataclass(frozen=True)
class Forced:
    """What the model says behind each of the last tokens of a text, and what its cache cost.

    logits: [batch, rest, vocabulary] in float32. Bytes, and the rows kept by each text, are those after the prefix;
    the profiles are those at the end of the text. prefill_share: see `KVCache`. Times in seconds; bytes and times are
    of the whole batch.
    """

    logits: Tensor
    stored_bytes: int
    peak_bytes: int
    parked_bytes: int
    kept: list[Kept]
    profiles: list[str | None]
    prefill_share: float | None
    prefix_seconds: float
    seconds: float
    notes: list[str]


@torch.inference_mode()
def force(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    mask: Tensor,
    rest: int,
    method: Any = None,
    *,
    piece: int = 1,
    prefill_chunk: int | None = None,
) -> Forced:
    """Read left-padded texts [batch, tokens]: all but the last `rest` tokens as a prompt, these in pieces of `piece`.

    Raises:
        ValueError: no token is left for the prompt or for the rest, or a piece has none.
    """
    prefix = ids.shape[1] - rest
    shortest = int(mask[:, :prefix].sum(dim=1).min()) if prefix > 0 else 0
    if rest < 1 or piece < 1 or shortest < 1:
        raise ValueError(
            f"no prompt, or nothing to force: {ids.shape[1]} tokens, {rest} of them forced {piece} at once"
        )
    ids, mask = (tensor.to(input_device(model)) for tensor in (ids, mask))
    began = time.perf_counter()
    cache = KVCache(model, method)
    read_prompt(model, tokenizer, cache, ids[:, :prefix], mask[:, :prefix], prefill_chunk)
    _wait(ids)
    prefix_seconds = time.perf_counter() - began
    cost = (cache.nbytes, cache.peak_nbytes, cache.parked_nbytes)
    kept = kept_by_row(cache)
    resumed = time.perf_counter()
    logits = torch.cat(list(feed(model, cache, ids, mask, prefix, piece)), dim=1)
    _wait(ids)
    seconds = prefix_seconds + time.perf_counter() - resumed
    profiles = [row.profile for row in kept_by_row(cache)]
    return Forced(logits, *cost, kept, profiles, cache.prefill_share, prefix_seconds, seconds, list(cache.notes))


def feed(model: Any, cache: KVCache, ids: Tensor, mask: Tensor, start: int, piece: int = 1) -> Iterator[Tensor]:
    """Feed the columns from `start` on of left-padded texts [batch, tokens], `piece` at once, to a cache of the rest.

    Yields what the model says behind each of them, in float32: [batch, columns of the piece, vocabulary].
    """
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    for first in range(start, ids.shape[1], piece):
        last = min(first + piece, ids.shape[1])
        output = model(
            ids[:, first:last], attention_mask=mask[:, :last], position_ids=positions[:, first:last],
            use_cache=True, **{compat.CACHE_ARGUMENT: cache},
        )  # fmt: skip
        yield output.logits.float()


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


@dataclass(frozen=True)
class Fidelity:
    """Means over the tokens of one text.

    kl: Kullback-Leibler divergence of the method's distribution from the full cache's, in nats. agreement: share of
    tokens with the same most likely next one. nll: negative log-likelihood of the text's own next tokens, in nats.
    """

    kl: float
    agreement: float
    nll: float
    full_nll: float


def compare(full: Tensor, found: Tensor, ids: Tensor) -> Fidelity:
    """Logits [rest, vocabulary] of the full cache and of a method behind the same tokens; ids [rest]: those tokens.

    The likelihood is that of ids[1:], the tokens that follow the first of them.
    """
    left, right = full.log_softmax(-1), found.to(full.device).log_softmax(-1)
    following = ids[1:].to(full.device)[:, None]
    return Fidelity(
        kl=float((left.exp() * (left - right)).sum(-1).mean()),
        agreement=float((left.argmax(-1) == right.argmax(-1)).float().mean()),
        nll=-float(right[:-1].gather(1, following).mean()),
        full_nll=-float(left[:-1].gather(1, following).mean()),
    )
