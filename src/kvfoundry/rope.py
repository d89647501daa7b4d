"""Rotate, un-rotate and move keys, for every rotary embedding (RoPE) of transformers.

A cached key is bound to the position it was rotated to. To reuse it elsewhere (a streaming window, a chunk of another
prompt) it has to be turned back and turned again with the frequencies, the layout and the scale of *its* model.

The angles come from a private copy of the model's own rotary module, so every variant (default, linear, dynamic,
llama3, YaRN, longrope, partial, per layer type) is the model's own arithmetic and nothing is left on the model. How the
attention module pairs channels is read off the module itself (`rope_layout`); a model that no layout reproduces, for
example one that scales its keys by learned weights after the rotation, is refused.

**Frequencies that depend on the length.** With dynamic and longrope embeddings the frequencies in force are those of
the forward call that made the key: call `length` the largest position of that call plus one, over the whole batch.
longrope uses its short factors up to `original_max_position_embeddings` and the long ones beyond; dynamic keeps the
trained base up to `max_position_embeddings` and stretches it beyond. `length` names that number. `rotate` takes the
largest of its positions plus one when it is absent, as the model does; `unrotate` and `move` ask for it, because rows
that were evicted since may have been the longest ones. The module is taken as it is before any call: a model that has
just seen a longer text keeps the dynamic frequencies of that text until it meets a shorter one.
"""

import copy
import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvfoundry.devices import computing_device
from kvfoundry.errors import KVFoundryError, UnsupportedModelError
from kvfoundry.kernels import rotation
from kvfoundry.kernels.rotation.naive import wide
from kvfoundry.rope_layout import (
    Layout,
    attention_modules,
    cos_sin,
    fresh_copy,
    inverse,
    read_layout,
    refusal,
    rotary_config,
    rotary_module,
)


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of one layer. Build it with `Rope.of`.

    Keys are [batch, heads, rows, head_dim] in any float dtype (computed in fp32 at least, returned in their own dtype);
    positions are [batch, heads or 1, rows], whole numbers. A position below 0 marks a slot without a row: what comes
    back there is finite and means nothing.
    """

    module: nn.Module
    layer_type: str | None
    layout: Layout | None
    depends_on_length: bool

    @classmethod
    def of(cls, model: nn.Module, layer_idx: int | None = None) -> "Rope":
        """The embedding of layer `layer_idx`; without an index, of all layers, which must then agree.

        A layer that keeps its keys unrotated in a model that rotates elsewhere (Cohere2, SmolLM3) gets a Rope that
        changes nothing. Raises UnsupportedModelError for a model without RoPE, for a way of rotating that is not a
        plain rotation of channel pairs, and, without an index, for layers that differ.
        """
        if layer_idx is not None:
            return _of_layer(model, layer_idx)
        ropes = [_of_layer(model, index) for index in sorted(attention_modules(model))]
        if not ropes:
            raise UnsupportedModelError(refusal(model, "it has no attention module that takes rotary tables"))
        if len({(rope.layer_type, rope.layout) for rope in ropes}) > 1:
            raise UnsupportedModelError(refusal(model, "its layers rotate differently; name one: Rope.of(model, i)"))
        return ropes[0]

    def rotate(self, raw: Tensor, positions: Tensor, *, length: int | None = None) -> Tensor:
        """The keys that the model would store for raw keys (after any key norm, before RoPE) at these positions."""
        _check_shapes(raw, positions)
        if self.layout is None or raw.shape[-2] == 0:
            return raw
        return rotation.turn(raw, *self._tables(raw, positions, length), self.layout.turning)

    def unrotate(self, keys: Tensor, positions: Tensor, *, length: int | None = None) -> Tensor:
        """The raw keys behind stored keys: inverse of `rotate` at the same positions and length."""
        _check_shapes(keys, positions)
        if self.layout is None or keys.shape[-2] == 0:
            return keys
        back = inverse(*self._tables(keys, positions, self._known_length(length)))
        return rotation.turn(keys, *back, self.layout.turning)

    def move(
        self,
        keys: Tensor,
        from_positions: Tensor,
        to_positions: Tensor,
        *,
        length: int | None = None,
        to_length: int | None = None,
    ) -> Tensor:
        """Keys stored at `from_positions`, as the model would have stored them at `to_positions`.

        `length` is that of the call that made the keys, `to_length` that of the text they move into (the same one, or
        the largest new position plus one where that is more). Rows that do not move come back bit for bit.
        """
        tables = self.tables_between(keys, from_positions, to_positions, length=length, to_length=to_length)
        return keys if tables is None else self.turned(keys, tables)

    def tables_between(
        self,
        keys: Tensor,
        from_positions: Tensor,
        to_positions: Tensor,
        *,
        length: int | None = None,
        to_length: int | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """What `move` turns keys like these by: cos and sin [batch, heads or 1, rows, pairs]; None: nothing turns.

        Both turns, back and forth, are one. Keys of the same positions turn alike in other layers of this embedding.
        """
        _check_shapes(keys, from_positions)
        _check_shapes(keys, to_positions)
        if self.layout is None or keys.shape[-2] == 0:
            return None
        length = self._known_length(length)
        if length is None:
            to_length = None  # fixed frequencies: lengths mean nothing
        elif to_length is None:
            to_length = max(length, int(to_positions.max()) + 1)
        before = inverse(*self._tables(keys, from_positions, length))
        after = self._tables(keys, to_positions, to_length)
        cos = before[0] * after[0] - before[1] * after[1]
        sin = before[0] * after[1] + before[1] * after[0]
        if length == to_length:
            stays = (from_positions.to(keys.device) == to_positions.to(keys.device)).unsqueeze(-1)
            cos, sin = cos.masked_fill(stays, 1.0), sin.masked_fill(stays, 0.0)
        return cos, sin

    def turned(self, keys: Tensor, tables: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        """Keys turned by `tables_between`; out: where the result goes, the keys themselves perhaps."""
        assert self.layout is not None
        return rotation.turn(keys, *tables, self.layout.turning, out=out)

    def move_bounds(
        self,
        low: Tensor,
        high: Tensor,
        from_positions: Tensor,
        to_positions: Tensor,
        *,
        length: int | None = None,
        to_length: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Bounds per channel of keys that move together: every key between `low` and `high` is, moved, between these.

        Arguments as in `move`; all keys of a row of bounds move from that row's one position to the other. A turned box
        does not stand on its sides any more, so the bounds get wider.
        """
        tables = self.tables_between(low, from_positions, to_positions, length=length, to_length=to_length)
        if tables is None or self.layout is None:
            return low, high
        center, half = self.turned((low + high) / 2, tables), wide((high - low) / 2)
        cos, sin = (table.abs() for table in tables)
        still, none = self.layout.turn(half, torch.zeros_like(cos), torch.zeros_like(cos)), torch.zeros_like(cos)
        half = self.layout.turn(half, cos, none) + self.layout.turn(half, none, sin).abs() - still
        half = half.to(low.dtype)
        return center - half, center + half

    def _tables(self, keys: Tensor, positions: Tensor, length: int | None) -> tuple[Tensor, Tensor]:
        """cos and sin [batch, heads or 1, rows, pairs] on the device of the keys."""
        assert self.layout is not None
        flat = positions.to(keys.device, torch.long).clamp(min=0).flatten(0, 1)
        module = self.module
        if self.depends_on_length:
            module = copy.deepcopy(module, {id(rotary_config(module)): rotary_config(module)})
            longest = int(flat.max()) + 1
            if length is not None and length < longest:
                raise KVFoundryError(f"length {length} does not cover position {longest - 1}; give the whole length.")
            last = flat.new_full((flat.shape[0], 1), (length or longest) - 1)
            flat = torch.cat((flat, last), dim=1)  # the module takes its frequencies from the largest position
        cos, sin = cos_sin(module, flat, self.layer_type, wide(keys).dtype)
        cos, sin = self.layout.tables(cos, sin)
        shape = (*positions.shape, -1)
        rows = positions.shape[-1]
        return cos[:, :rows].reshape(shape), sin[:, :rows].reshape(shape)

    def _known_length(self, length: int | None) -> int | None:
        if not self.depends_on_length:
            return None
        if length is None:
            raise KVFoundryError(
                "the RoPE frequencies of this model depend on the length of the text that the keys come from; "
                "pass length=, the largest position of that forward call plus one."
            )
        return length


def _of_layer(model: nn.Module, layer_idx: int) -> Rope:
    attention = attention_modules(model).get(layer_idx)
    if attention is None:
        raise UnsupportedModelError(refusal(model, f"layer {layer_idx} has no attention that takes rotary tables"))
    rotary = rotary_module(model)
    if rotary is None:
        raise UnsupportedModelError(refusal(model, "it has no rotary module: its positions are not RoPE"))
    layer_type = None
    if "layer_type" in inspect.signature(type(rotary).forward).parameters:
        layer_type = rotary_config(rotary).layer_types[layer_idx]
    kinds = getattr(rotary, "rope_type", "default")
    kind = kinds.get(layer_type, "default") if isinstance(kinds, dict) else kinds
    layout = read_layout(model, attention, fresh_copy(rotary), layer_type)
    # Its tables are for the rows of this layer: on another device they would be copied at every call.
    own, device = fresh_copy(rotary), computing_device(attention)
    own = own if device is None else own.to(device)
    return Rope(own, layer_type, layout, "dynamic" in kind or kind == "longrope")


def _check_shapes(keys: Tensor, positions: Tensor) -> None:
    batch, heads, rows, _ = keys.shape if keys.ndim == 4 else (-1, -1, -1, -1)
    if tuple(positions.shape) not in ((batch, heads, rows), (batch, 1, rows)):
        raise KVFoundryError(
            f"keys {tuple(keys.shape)} and positions {tuple(positions.shape)} do not fit; "
            "give [batch, heads, rows, head_dim] and [batch, heads or 1, rows]."
        )
