"""What a codec does with one layer after each call: wait for the prompt, settle, encode, and say what it costs.

A `RowsCodec` has no state; what it has to remember between calls of one layer lives here, inside the cache.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvfoundry.codecs.base import RowsCodec, Site
from kvfoundry.columns import newest
from kvfoundry.errors import DataError
from kvfoundry.layouts import Layout
from kvfoundry.layouts.base import RowsView
from kvfoundry.method import Method
from kvfoundry.rope import Rope

# Attention logits of the prompt's last queries may change by this share of their spread before a warning is due.
WARN_LOGIT_ERROR = 0.5
# How many of these queries, and how many coded rows, the figure is taken from.
_PROBED_QUERIES, _PROBED_ROWS = 16, 1024


class LossyCodecWarning(UserWarning):
    """A codec loses more of this model's keys than it should."""


@dataclass
class Losses:
    """Measured logit errors of one cache: layer -> share. warned: whether the user has been told."""

    by_layer: dict[int, float] = field(default_factory=dict)
    warned: bool = False

    def sentence(self, method: Method) -> str | None:
        """The warning, with the worst layer's figure; None while all layers are within the bound."""
        if not self.by_layer:
            return None
        layer, worst = max(self.by_layer.items(), key=lambda item: item[1])
        if worst <= WARN_LOGIT_ERROR:
            return None
        assert method.codec is not None
        return (
            f"{method} changes the attention logits of layer {layer} by {worst:.0%} of their spread (more than "
            f"{WARN_LOGIT_ERROR:.0%}): this model's key channels do not suit it; {method.codec.remedy}."
        )


class Coding:
    """The codec of one layer: settled for its head sizes by the first rows, and the queries that it asks for."""

    def __init__(self, method: Method, layer_idx: int, num_layers: int, family: str, rope: Rope | None):
        assert method.codec is not None
        self.method, self.place, self.family, self.rope = method, (layer_idx, num_layers), family, rope
        self.codec: RowsCodec | None = None
        self._window: tuple[Tensor, Tensor] | None = None

    def enter(self, keys: Tensor, values: Tensor) -> None:
        """Look at new rows before they are stored: SpecError or DataError for what cannot be served."""
        if keys.numel():
            # The extremes of both sides, asked for once: NaN and infinity are found among them.
            extremes = torch.stack([extreme for rows in (keys, values) for extreme in rows.aminmax()])
            finite = torch.isfinite(extremes).tolist()
            for name, ends in (("keys", finite[:2]), ("values", finite[2:])):
                if not all(ends):
                    raise DataError(
                        f"{self.family}: the {name} of layer {self.place[0]} are not finite, so {self.method} cannot "
                        "store them; load the model in another dtype."
                    )
        self.settle(keys.shape[3], values.shape[3])

    def settle(self, head_dim: int, value_dim: int) -> RowsCodec:
        """The codec of this layer, for rows of these widths; SpecError where it cannot serve them."""
        if self.codec is None:
            assert self.method.codec is not None
            sites = (Site(*self.place, dim, self.rope, self.family) for dim in (head_dim, value_dim))
            self.codec = self.method.codec.at(*sites)
        return self.codec

    def after(
        self,
        rows: Layout,
        query: Tensor | None,
        positions: Tensor | None,
        losses: Losses,
        *,
        prompt_ends: bool,
        waits: bool,
    ) -> Layout:
        """The rows after a call. prompt_ends: it is the last one of the prompt, or later; waits: nothing may be coded.

        query: [batch, query_heads, tokens, head_dim] of the call, real tokens first; positions: [batch, tokens].
        None when rows become free to be coded between calls.
        """
        assert self.codec is not None
        if rows.coded:
            return rows.flushed()
        wanted = max(self.codec.window, _PROBED_QUERIES)
        if query is None or positions is None:
            assert self._window is not None
            query, positions = self._window
        elif self._window is not None:
            query = torch.cat([self._window[0], query], dim=2)
            positions = torch.cat([self._window[1], positions], dim=1)
        query, positions = newest(query, positions, wanted)
        if waits or (self.codec.fits and not prompt_ends):
            self._window = query.clone(), positions.clone()
            return rows
        self._window = None
        view = rows.view()
        window = self.codec.window
        asked = (query * (positions >= 0)[:, None, :, None])[:, :, -window:] if window else None
        if asked is not None and asked.shape[2] < window:
            asked = torch.nn.functional.pad(asked, (0, 0, window - asked.shape[2], 0))
        coded = self.codec.store(view, asked)
        if query.shape[2] > 1:
            error = logit_error(coded, view, query[:, :, -_PROBED_QUERIES:])
            if error is not None:
                losses.by_layer[self.place[0]] = error
            sentence = None if losses.warned else losses.sentence(self.method)
            if sentence is not None:
                losses.warned = True
                warnings.warn(sentence, LossyCodecWarning, stacklevel=2)
        return coded

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that is remembered."""
        if self._window is not None:
            yield from self._window

    def selected(self, indices: Tensor) -> Coding:
        """The memory of the batch rows `indices`."""
        twin = copy.copy(self)
        if self._window is not None:
            query, positions = self._window
            twin._window = query[indices.to(query.device)], positions[indices.to(query.device)]
        return twin


def logit_error(rows: Layout, view: RowsView, query: Tensor) -> float | None:
    """How much the codes change what queries see: |q(K' - K)| / |qK|, both without their mean over the rows.

    (Softmax does not notice what all logits have in common.) Over the first coded rows that every head has; view holds
    the rows as they were. None where too few rows are coded.
    """
    start, stop = rows.coded_span()
    stop = min(stop, start + _PROBED_ROWS)
    if stop - start < 2:
        return None
    heads = rows.lengths.shape[1]
    exact = view.keys[:, :, start:stop].float().repeat_interleave(heads // view.keys.shape[1], dim=1)
    change = rows.coded_keys(start, stop, view).float() - exact
    packed = query.float().reshape(query.shape[0], heads, -1, query.shape[3])
    logits, changes = (packed @ part.transpose(-1, -2) for part in (exact, change))
    spread, lost = (part - part.mean(dim=-1, keepdim=True) for part in (logits, changes))
    found, whole = torch.stack([lost.norm(), spread.norm()]).tolist()  # the host waits once
    return found / whole if whole > 0 else None
