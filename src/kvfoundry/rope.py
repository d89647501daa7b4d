"""Rotate, un-rotate and move keys, for every rotary embedding (RoPE) of transformers.

A cached key is bound to the position it was rotated to. To reuse it elsewhere (a streaming window, a chunk of another
prompt) it has to be turned back and turned again with the frequencies, the layout and the scale of *its* model.

The angles come from a private copy of the model's own rotary module, so every variant (default, linear, dynamic,
llama3, YaRN, longrope, partial, per layer type) is the model's own arithmetic and nothing is left on the model. How an
attention module pairs channels (halves or neighbours, which channels, which direction, whether at all) is not guessed
from names: the module is asked once with three tokens, and the one layout that reproduces its keys is taken. A model
that no layout reproduces, for example one that normalises keys after the rotation, is refused.

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
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvfoundry.errors import KVFoundryError, UnsupportedModelError

_PROBE_POSITIONS = (0, 5, 11)
_CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")


@dataclass(frozen=True)
class _Layout:
    """Which channels of a key form the pairs that turn, and how the module's tables list their angles.

    table: "single" (one entry per pair), "doubled" (all pairs, then all again) or "repeated" (each entry twice).
    neighbours: pairs are channels (2i, 2i+1); otherwise (i, i + pairs). start: first rotated channel. sign: direction.
    """

    table: str
    neighbours: bool
    start: int
    sign: int
    pairs: int

    def per_pair(self, table: Tensor) -> Tensor:
        """[..., width of the module's table] -> [..., pairs]."""
        if self.table == "repeated":
            return table[..., ::2]
        return table[..., : self.pairs]

    def turn(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Keys [..., rows, head_dim] turned by tables that broadcast to [..., rows, pairs]; other channels pass."""
        stop = self.start + 2 * self.pairs
        block = keys[..., self.start : stop]
        if self.neighbours:
            first, second = block[..., 0::2], block[..., 1::2]
        else:
            first, second = block[..., : self.pairs], block[..., self.pairs :]
        turned = (first * cos - second * sin, second * cos + first * sin)
        merged = torch.stack(turned, dim=-1).flatten(-2) if self.neighbours else torch.cat(turned, dim=-1)
        return torch.cat((keys[..., : self.start], merged, keys[..., stop:]), dim=-1)


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of one layer. Build it with `Rope.of`.

    Keys are [batch, heads, rows, head_dim] in any float dtype (computed in fp32 at least, returned in their own dtype);
    positions are [batch, heads or 1, rows], whole numbers. A position below 0 marks a slot without a row: what comes
    back there is finite and means nothing.
    """

    module: nn.Module
    layer_type: str | None
    layout: _Layout | None
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
        ropes = [_of_layer(model, index) for index in sorted(_attention_modules(model))]
        if not ropes:
            raise UnsupportedModelError(_refusal(model, "it has no attention module that takes rotary tables"))
        if len({(rope.layer_type, rope.layout) for rope in ropes}) > 1:
            raise UnsupportedModelError(_refusal(model, "its layers rotate differently; name one: Rope.of(model, i)"))
        return ropes[0]

    def rotate(self, raw: Tensor, positions: Tensor, *, length: int | None = None) -> Tensor:
        """The keys that the model would store for raw keys (after any key norm, before RoPE) at these positions."""
        _check_shapes(raw, positions)
        if self.layout is None or raw.shape[-2] == 0:
            return raw
        cos, sin = self._tables(raw, positions, length)
        return self.layout.turn(_wide(raw), cos, sin).to(raw.dtype)

    def unrotate(self, keys: Tensor, positions: Tensor, *, length: int | None = None) -> Tensor:
        """The raw keys behind stored keys: inverse of `rotate` at the same positions and length."""
        _check_shapes(keys, positions)
        if self.layout is None or keys.shape[-2] == 0:
            return keys
        return self._turn_back(keys, positions, self._known_length(length)).to(keys.dtype)

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
        _check_shapes(keys, from_positions)
        _check_shapes(keys, to_positions)
        if self.layout is None or keys.shape[-2] == 0:
            return keys
        length = self._known_length(length)
        if length is not None and to_length is None:
            to_length = max(length, int(to_positions.max()) + 1)
        raw = self._turn_back(keys, from_positions, length)
        moved = self.layout.turn(raw, *self._tables(keys, to_positions, to_length)).to(keys.dtype)
        if length != to_length:
            return moved
        return torch.where((from_positions == to_positions).unsqueeze(-1), keys, moved)

    def _turn_back(self, keys: Tensor, positions: Tensor, length: int | None) -> Tensor:
        assert self.layout is not None
        cos, sin = self._tables(keys, positions, length)
        # YaRN and longrope scale the tables: (cos, sin) has the length s, so its inverse is (cos, -sin) / s^2.
        squared = cos * cos + sin * sin
        return self.layout.turn(_wide(keys), cos / squared, -sin / squared)

    def _tables(self, keys: Tensor, positions: Tensor, length: int | None) -> tuple[Tensor, Tensor]:
        """cos and sin [batch, heads or 1, rows, pairs] on the device of the keys."""
        assert self.layout is not None
        flat = positions.to(keys.device, torch.long).clamp(min=0).flatten(0, 1)
        module = self.module
        if self.depends_on_length:
            module = copy.deepcopy(module, {id(_config(module)): _config(module)})
            longest = int(flat.max()) + 1
            if length is not None and length < longest:
                raise KVFoundryError(f"length {length} does not cover position {longest - 1}; give the whole length.")
            last = flat.new_full((flat.shape[0], 1), (length or longest) - 1)
            flat = torch.cat((flat, last), dim=1)  # the module takes its frequencies from the largest position
        cos, sin = _cos_sin(module, flat, self.layer_type, _wide(keys).dtype)
        shape = (*positions.shape, -1)
        cos, sin = (self.layout.per_pair(table[:, : positions.shape[-1]]).reshape(shape) for table in (cos, sin))
        return cos, sin * self.layout.sign

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
    attention = _attention_modules(model).get(layer_idx)
    if attention is None:
        raise UnsupportedModelError(_refusal(model, f"layer {layer_idx} has no attention that takes rotary tables"))
    rotary = _rotary_module(model)
    if rotary is None:
        raise UnsupportedModelError(_refusal(model, "it has no rotary module: its positions are not RoPE"))
    module = _fresh_copy(rotary)
    layer_type = None
    if "layer_type" in inspect.signature(type(rotary).forward).parameters:
        layer_type = _config(rotary).layer_types[layer_idx]
    kinds = getattr(rotary, "rope_type", "default")
    kind = kinds.get(layer_type, "default") if isinstance(kinds, dict) else kinds
    layout = _probe(model, attention, module, layer_type)
    return Rope(module, layer_type, layout, "dynamic" in kind or kind == "longrope")


class _Captured(Exception):
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values


class _Trap:
    """Stands in for a cache: the first `update` hands out the keys and ends the call."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise _Captured(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@torch.no_grad()
def _probe(model: Any, attention: nn.Module, module: nn.Module, layer_type: str | None) -> _Layout | None:
    """The layout that links the attention's own keys of three tokens at position 0 and elsewhere; None: no rotation."""
    device = next((p.device for p in attention.parameters() if p.device.type != "meta"), torch.device("cpu"))
    there = torch.tensor([_PROBE_POSITIONS], device=device)
    size = model.config.get_text_config().hidden_size
    hidden = torch.randn(1, there.shape[1], size, generator=torch.Generator().manual_seed(0)).to(device, model.dtype)
    try:
        stored = [
            _stored_by(attention, hidden, _model_tables(module, at, layer_type, model.dtype)) for at in (there * 0, there)
        ]
        width = _cos_sin(module, there, layer_type, torch.float32)[0].shape[-1]
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError) as error:
        raise UnsupportedModelError(_refusal(model, f"its attention cannot be asked for keys ({error})")) from error
    (origin, values), (turned, values_there) = stored
    if not torch.equal(values, values_there):
        raise UnsupportedModelError(_refusal(model, "it stores rotated channels beside the keys (latent attention)"))
    if torch.equal(origin, turned):
        return None
    origin, turned = origin.float(), turned.float()
    errors: dict[_Layout, float] = {}
    for table, neighbours, at_end, sign in itertools.product(
        ("single", "doubled", "repeated"), (False, True), (False, True), (1, -1)
    ):
        pairs = width if table == "single" else width // 2
        if 2 * pairs <= origin.shape[-1]:
            layout = _Layout(table, neighbours, origin.shape[-1] - 2 * pairs if at_end else 0, sign, pairs)
            rope = Rope(module, layer_type, layout, depends_on_length=False)
            errors[layout] = float((rope.move(origin, there[None] * 0, there[None]) - turned).abs().max())
    best = min(errors, key=errors.__getitem__)
    bound = 1e-4 if torch.finfo(model.dtype).eps < 1e-5 else 5e-2
    if not errors[best] <= bound * float(origin.abs().max()):
        raise UnsupportedModelError(_refusal(model, "its stored keys are not a plain rotation of the keys before RoPE"))
    return best


def _stored_by(attention: nn.Module, hidden: Tensor, tables: Any) -> tuple[Tensor, Tensor]:
    """What the attention module hands to its cache: keys and values [batch, heads, rows, head_dim]."""
    parameters = inspect.signature(type(attention).forward).parameters
    given: dict[str, Any] = {name: None for name, p in parameters.items() if p.default is p.empty and p.kind < 2}
    given.pop("self", None)
    given |= {"hidden_states": hidden, "position_embeddings": tables}
    given[next(name for name in _CACHE_NAMES if name in parameters)] = _Trap()
    try:
        attention(**given)
    except _Captured as captured:
        return captured.keys, captured.values
    raise ValueError("it stores no keys of its own")


def _model_tables(module: nn.Module, positions: Tensor, layer_type: str | None, dtype: torch.dtype) -> Any:
    """The rotary module's own output for positions [rows of a batch, tokens]: (cos, sin), (sin, cos) or complex."""
    like = torch.empty(1, dtype=dtype, device=positions.device)
    return module(like, positions, *(() if layer_type is None else (layer_type,)))


def _cos_sin(module: nn.Module, positions: Tensor, layer_type: str | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [..., tokens, width], whatever form and order the module returns them in."""
    # A token at position 0 in front tells cos from sin: there the sine is nothing but zeros.
    padded = torch.cat((torch.zeros_like(positions[:, :1]), positions), dim=1)
    tables = _model_tables(module, padded, layer_type, dtype)
    first, second = (tables.real, tables.imag) if isinstance(tables, Tensor) else tables
    if not first[:, 0].any():
        first, second = second, first
    return first[:, 1:], second[:, 1:]


def _attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Layer index -> the text decoder's attention modules that take rotary tables and a cache."""
    found: dict[int, nn.Module] = {}
    for module in _decoder(model).modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and "attention" in type(module).__name__.lower():
            parameters = inspect.signature(type(module).forward).parameters
            if "position_embeddings" in parameters and any(name in parameters for name in _CACHE_NAMES):
                found.setdefault(index, module)
    return found


def _rotary_module(model: nn.Module) -> nn.Module | None:
    """The text decoder's rotary module: the one nearest to its root, past those of vision towers and layers."""
    named = [(name.count("."), m) for name, m in _decoder(model).named_modules() if "Rotary" in type(m).__name__]
    return min(named, key=lambda pair: pair[0], default=(0, None))[1]


def _decoder(model: Any) -> nn.Module:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return model if decoder is None else decoder


def _config(rotary: nn.Module) -> Any:
    return getattr(rotary, "config", None)


def _fresh_copy(rotary: nn.Module) -> nn.Module:
    """A private copy with the frequencies it had before any call; the config is shared, not copied."""
    fresh = copy.deepcopy(rotary, {id(_config(rotary)): _config(rotary)})
    for name, _ in list(fresh.named_buffers()):
        original = getattr(fresh, name.replace("inv_freq", "original_inv_freq"), None)
        if name.endswith("inv_freq") and "original" not in name and original is not None:
            setattr(fresh, name, original.clone())
    for name in [name for name in vars(fresh) if name.endswith("max_seq_len_cached")]:
        setattr(fresh, name, fresh.original_max_seq_len)
    return fresh


def _wide(keys: Tensor) -> Tensor:
    return keys.to(torch.promote_types(keys.dtype, torch.float32))


def _check_shapes(keys: Tensor, positions: Tensor) -> None:
    batch, heads, rows, _ = keys.shape if keys.ndim == 4 else (-1, -1, -1, -1)
    if tuple(positions.shape) not in ((batch, heads, rows), (batch, 1, rows)):
        raise KVFoundryError(
            f"keys {tuple(keys.shape)} and positions {tuple(positions.shape)} do not fit; "
            "give [batch, heads, rows, head_dim] and [batch, heads or 1, rows]."
        )


def _refusal(model: nn.Module, cause: str) -> str:
    return f"cannot re-rotate the keys of {type(model).__name__}: {cause}."
