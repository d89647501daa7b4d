"""The mask of one forward pass, kept symbolic on its way through the model.

transformers asks a registered mask function for a mask and hands whatever it returns, untouched, to the attention
function. Ours returns a `PromptMask`: our layers read the 2D padding mask from it, and for a plain transformers cache
the usual 4D mask is built on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from kvfoundry.errors import CacheStateError, UnsupportedModelError
from kvfoundry.visibility import WindowRule


@dataclass(frozen=True)
class Tokens:
    """The tokens of one call without their padding.

    positions: [batch, width] index of each token in its own sequence, real tokens first, -1 behind them.
    gather: [batch, width] their columns in the call, None when nothing is padded.
    counts: [batch] real tokens, on the CPU, None when all are real. padded_to: columns up to which some row is padding.
    """

    positions: Tensor
    gather: Tensor | None
    counts: Tensor | None
    padded_to: int = 0

    def on(self, device: torch.device) -> Tokens:
        """The same on another device."""
        gather = None if self.gather is None else self.gather.to(device)
        return Tokens(self.positions.to(device), gather, self.counts, self.padded_to)


@dataclass(frozen=True)
class PromptMask:
    """Arguments of the mask call. attention_mask: boolean [batch, seen + queries] or None; the rest as transformers."""

    attention_mask: Tensor | None = None
    q_length: int = 0
    kv_length: int = 0
    q_offset: int = 0
    kv_offset: int = 0
    batch_size: int = 1
    mask_function: Callable[..., Tensor] | None = None
    use_vmap: bool = False
    local_size: int | None = None
    allow_is_causal_skip: bool = True
    device: torch.device | str = "cpu"
    _tokens: dict[tuple[int, ...], dict[torch.device, Tokens]] = field(default_factory=dict, compare=False, repr=False)
    _checked: set[WindowRule] = field(default_factory=set, compare=False, repr=False)

    def to(self, *args: Any, **kwargs: Any) -> PromptMask:
        """Itself: device placement happens where the mask is read (accelerate moves arguments between devices)."""
        return self

    @cached_property
    def dense(self) -> Tensor | None:
        """The boolean 4D mask [batch, 1, queries, rows] that SDPA would get, None when causality alone suffices."""
        assert self.mask_function is not None
        return sdpa_mask(
            batch_size=self.batch_size,
            q_length=self.q_length,
            kv_length=self.kv_length,
            q_offset=self.q_offset,
            kv_offset=self.kv_offset,
            mask_function=self.mask_function,
            attention_mask=self.attention_mask,
            local_size=self.local_size,
            allow_is_causal_skip=self.allow_is_causal_skip,
            use_vmap=self.use_vmap,
            device=self.device,
        )

    def tokens(self, queries: int, seen: int, real: Tensor, device: torch.device) -> Tokens:
        """Positions of this call's tokens.

        queries: tokens in the call, padding included; seen: columns before it; real: [batch] real tokens before it, on
        the CPU. The same answer serves every layer of the forward pass on one device. Raises CacheStateError when the
        2D mask does not cover exactly the columns seen so far and the new ones.
        """
        known = self._tokens.setdefault((queries, seen, *real.tolist()), {})
        if device not in known:
            other = next(iter(known.values()), None)  # of a layer on another device of a split model
            known[device] = self._compact(queries, seen, real, device) if other is None else other.on(device)
        return known[device]

    def _compact(self, queries: int, seen: int, real: Tensor, device: torch.device) -> Tokens:
        offset = real.to(device)[:, None]
        mask = self.attention_mask
        if mask is not None and mask.shape[1] != seen + queries:
            raise CacheStateError(
                f"attention_mask covers {mask.shape[1]} tokens, but the cache has seen {seen} and {queries} are new: "
                f"pass a mask of {seen + queries} columns, dropped tokens included, or none."
            )
        if mask is not None and seen and not torch.equal(mask[:, :seen].sum(dim=1).cpu(), real):
            raise CacheStateError(
                "attention_mask marks other tokens of the past as padding than the masks of earlier calls did: the "
                "cache stores the real tokens it was given; pass the same mask, longer, or reset() the cache."
            )
        if mask is None or bool(mask[:, seen:].all()):
            return Tokens(offset + torch.arange(queries, device=device), None, None)
        fresh = mask[:, seen:].to(device=device, dtype=torch.bool)
        counts = fresh.sum(dim=1).cpu()
        width = max(1, int(counts.max()))
        gather = (~fresh).to(torch.int8).argsort(dim=1, stable=True)[:, :width]
        index = torch.arange(width, device=device)
        inside = index < counts.to(device)[:, None]
        padded_to = seen + 1 + int((~fresh).any(dim=0).nonzero().max())
        return Tokens((offset + index).masked_fill(~inside, -1), gather, counts, padded_to)

    def check(self, rule: WindowRule, family: str) -> None:
        """Raise UnsupportedModelError unless the model's mask is causality plus this window rule.

        Compared numerically on a sample of the mask, so that any family that overlays something else (bidirectional
        image blocks, packed sequences) is refused by name instead of being answered wrongly.
        """
        if rule in self._checked or self.mask_function is None:
            return
        query = _sample(self.q_offset, self.q_length).to(self.device)
        key = _sample(self.kv_offset, self.kv_length).to(self.device)
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=self.device)
        pad = 0
        if rule.chunked is not None and self.attention_mask is not None:
            # Chunks are counted from the first real token; sample the first row, whose padding is known here.
            pad = int((self.attention_mask[0].to(torch.int64).cumsum(0) == 0).sum())
        expected = rule.allows(query[None, None, :, None] - pad, key[None, None, None, :] - pad)
        try:
            found = self.mask_function(zero, zero, query[None, None, :, None], key[None, None, None, :])
            same = torch.equal(found.expand_as(expected), expected)
        except (IndexError, RuntimeError, TypeError):
            same = False
        if not same:
            raise UnsupportedModelError(
                f"{family}: its attention mask is not causal with an optional window; kvfoundry serves causal decoders "
                "with full, sliding or chunked attention layers."
            )
        self._checked.add(rule)


def _sample(offset: int, length: int, points: int = 48) -> Tensor:
    if length <= points:
        return torch.arange(offset, offset + length)
    return torch.linspace(offset, offset + length - 1, points).round().to(torch.long)


def prompt_mask(
    *,
    attention_mask: Tensor | None = None,
    batch_size: int = 1,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    use_vmap: bool = False,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str | None = None,
    **_: Any,
) -> PromptMask:
    """The registered mask function: everything that is needed later, nothing computed now."""
    if device is None:
        device = attention_mask.device if attention_mask is not None else "cpu"
    return PromptMask(
        attention_mask=attention_mask,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=int(q_offset),
        kv_offset=int(kv_offset),
        batch_size=batch_size,
        mask_function=mask_function,
        use_vmap=use_vmap,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        device=device,
    )
