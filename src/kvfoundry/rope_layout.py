"""How one attention module rotates its keys, read off the module itself.

Layouts differ per family: pairs are halves or neighbours, tables list each angle once or twice, some channels pass. A
wrong guess gives plausible keys that are wrong, so the module is asked: three tokens, once at position 0 and once at
others, up to the point where it hands its keys to the cache. The one layout that links both answers is taken.
"""

import copy
import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvfoundry.devices import computing_device
from kvfoundry.errors import UnsupportedModelError
from kvfoundry.kernels.rotation.naive import Pairs, turned_wide

_PROBE_POSITIONS = (0, 5, 11)
_CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")


@dataclass(frozen=True)
class Layout:
    """Which channels of a key form the pairs that turn, and how the module's tables list their angles.

    table: "single" (one entry per pair), "doubled" (all pairs, then all again) or "repeated" (each entry twice).
    neighbours: pairs are channels (2i, 2i+1); otherwise (i, i + pairs). start: first rotated channel. sign: direction.
    """

    table: str
    neighbours: bool
    start: int
    sign: int
    pairs: int

    def tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The module's tables [..., width] as one angle per pair, [..., pairs], in our direction of turning."""
        pick = slice(None, None, 2) if self.table == "repeated" else slice(self.pairs)
        return cos[..., pick], sin[..., pick] * self.sign

    def turn(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Keys [..., rows, head_dim] turned by tables that broadcast to [..., rows, pairs]; other channels pass."""
        return turned_wide(keys, cos, sin, self.turning)

    @property
    def turning(self) -> Pairs:
        """The pairs as the kernels of `kernels.rotation` take them."""
        return Pairs(self.start, self.pairs, self.neighbours)


def inverse(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables that turn back: YaRN and longrope scale (cos, sin) to a length s, and the inverse is (cos, -sin) / s^2."""
    squared = cos * cos + sin * sin
    return cos / squared, -sin / squared


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
def read_layout(model: Any, attention: nn.Module, module: nn.Module, layer_type: str | None) -> Layout | None:
    """The layout that links the attention's own keys of three tokens at position 0 and elsewhere; None: no rotation."""
    device = computing_device(attention) or torch.device("cpu")
    there = torch.tensor([_PROBE_POSITIONS], device=device)
    size = model.config.get_text_config().hidden_size
    hidden = torch.randn(1, there.shape[1], size, generator=torch.Generator().manual_seed(0)).to(device, model.dtype)
    try:
        stored = [
            handed_over(attention, hidden, _model_tables(module, at, layer_type, model.dtype))
            for at in (there * 0, there)
        ]
        at_origin, at_there = (cos_sin(module, at, layer_type, torch.float32) for at in (there * 0, there))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError) as error:
        raise UnsupportedModelError(refusal(model, f"its attention cannot be asked for keys ({error})")) from error
    (origin, values), (turned, values_there) = stored
    if not torch.equal(values, values_there):
        raise UnsupportedModelError(refusal(model, "it stores rotated channels beside the keys (latent attention)"))
    if torch.equal(origin, turned):
        return None
    origin, turned = origin.float(), turned.float()
    errors: dict[Layout, float] = {}
    for table, neighbours, at_end, sign in itertools.product(
        ("single", "doubled", "repeated"), (False, True), (False, True), (1, -1)
    ):
        width = at_there[0].shape[-1]
        pairs = width if table == "single" else width // 2
        if 2 * pairs <= origin.shape[-1]:
            layout = Layout(table, neighbours, origin.shape[-1] - 2 * pairs if at_end else 0, sign, pairs)
            raw = layout.turn(origin, *inverse(*layout.tables(*at_origin)))
            errors[layout] = float((layout.turn(raw, *layout.tables(*at_there)) - turned).abs().max())
    best = min(errors, key=errors.__getitem__)
    bound = 1e-4 if torch.finfo(model.dtype).eps < 1e-5 else 5e-2
    if not errors[best] <= bound * float(origin.abs().max()):
        raise UnsupportedModelError(refusal(model, "its stored keys are not a plain rotation of the keys before RoPE"))
    return best


def handed_over(attention: nn.Module, hidden: Tensor, tables: Any) -> tuple[Tensor, Tensor]:
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


def cos_sin(module: nn.Module, positions: Tensor, layer_type: str | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [..., tokens, width], whatever form and order the module returns them in."""
    # A token at position 0 in front tells cos from sin: there the sine is nothing but zeros.
    padded = torch.cat((torch.zeros_like(positions[:, :1]), positions), dim=1)
    tables = _model_tables(module, padded, layer_type, dtype)
    first, second = (tables.real, tables.imag) if isinstance(tables, Tensor) else tables
    if not first[:, 0].any():
        first, second = second, first
    return first[:, 1:], second[:, 1:]


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Layer index -> the text decoder's attention modules that take rotary tables and a cache."""
    found: dict[int, nn.Module] = {}
    for module in _decoder(model).modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and "attention" in type(module).__name__.lower():
            parameters = inspect.signature(type(module).forward).parameters
            if "position_embeddings" in parameters and any(name in parameters for name in _CACHE_NAMES):
                found.setdefault(index, module)
    return found


def rotary_module(model: nn.Module) -> nn.Module | None:
    """The text decoder's rotary module: the one nearest to its root, past those of vision towers and layers."""
    named = [(name.count("."), m) for name, m in _decoder(model).named_modules() if "Rotary" in type(m).__name__]
    return min(named, key=lambda pair: pair[0], default=(0, None))[1]


def _decoder(model: Any) -> nn.Module:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return model if decoder is None else decoder


def rotary_config(rotary: nn.Module) -> Any:
    return getattr(rotary, "config", None)


def fresh_copy(rotary: nn.Module) -> nn.Module:
    """A private copy with the frequencies it had before any call; the config is shared, not copied.

    It computes where its positions are, also when accelerate has bound the model's own to one device of several.
    """
    # A hook may hold every weight that waits on the host.
    shared = [rotary_config(rotary), getattr(rotary, "_hf_hook", None)]
    fresh = copy.deepcopy(rotary, {id(each): each for each in shared})
    if hasattr(fresh, "_hf_hook"):
        from accelerate.hooks import remove_hook_from_module

        fresh = remove_hook_from_module(fresh)
    for name, _ in list(fresh.named_buffers()):
        original = getattr(fresh, name.replace("inv_freq", "original_inv_freq"), None)
        if name.endswith("inv_freq") and "original" not in name and original is not None:
            setattr(fresh, name, original.clone())
    for name in [name for name in vars(fresh) if name.endswith("max_seq_len_cached")]:
        setattr(fresh, name, fresh.original_max_seq_len)
    return fresh


def refusal(model: nn.Module, cause: str) -> str:
    return f"cannot re-rotate the keys of {type(model).__name__}: {cause}."
