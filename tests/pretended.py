"""Devices that are pretended: tensors of the CPU that say they are elsewhere, and refuse to meet as real ones would.

A mode stands between Python and every function of torch. It keeps a device with each tensor, answers `tensor.device`
from it, and raises where a function is given tensors of two devices that torch would not take together. All numbers are
those of the CPU, so a model that is split over pretended devices must say bit for bit what it says on one; and every
branch of Python code that looks at data runs as it is, which torch's own fake tensors cannot do.

What torch takes from two devices is taken here too: a number (no dimension) of the CPU anywhere, an index of the CPU
into any tensor, and copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

CPU = torch.device("cpu")
# Of a kind that the code under test knows nothing of, so that it takes no path made for CUDA.
FIRST, SECOND = torch.device("ipu:0"), torch.device("ipu:1")
_PLACE = "pretended_device"
_INDEXING = {"__getitem__", "index_put", "index_put_", "__setitem__"}
# Functions that ask of their other tensors nothing but sizes, or copy from them.
_TOLERANT = {"copy_", "view_as", "expand_as", "reshape_as"}


class MixedDevicesError(RuntimeError):
    """Tensors of different pretended devices met in one call."""


def place_of(tensor: Tensor) -> torch.device:
    """The device that a tensor is said to be on."""
    return getattr(tensor, _PLACE, CPU)


def put(tensor: Tensor, device: torch.device) -> Tensor:
    """Say that a tensor is on a device from now on."""
    setattr(tensor, _PLACE, device)
    return tensor


class PretendedDevices(TorchFunctionMode):
    """While it is entered, `device=` and `.to` may name FIRST and SECOND."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            return self._attribute(func, args)
        tensors = [*_tensors(args), *_tensors(kwargs)] if kwargs else list(_tensors(args))
        if name in ("to", "cpu", "cuda"):
            return self._moved(name, args, kwargs)
        target = place_of(args[0]) if name in _TOLERANT else self._met(name, args, tensors)
        if isinstance(kwargs.get("device"), (str, int, torch.device)):
            target = _device(kwargs["device"])
            kwargs["device"] = CPU
        if name == "__set__" and len(args) == 2 and isinstance(args[1], Tensor):  # tensor.data = other
            target = place_of(args[1])
            put(args[0], target)
        result = func(*args, **kwargs)
        for leaf in _tensors(result):
            if not any(leaf is given for given in tensors):
                put(leaf, target)
        return result

    def _attribute(self, func: Any, args: tuple[Any, ...]) -> Any:
        found = func(*args)
        if isinstance(found, torch.device) and isinstance(args[0], Tensor):
            return found if found.type == "meta" else place_of(args[0])
        if isinstance(found, Tensor):
            return put(found, place_of(args[0]))
        return found

    def _moved(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        tensor, given, target = args[0], [*args[1:], *kwargs.values()], place_of(args[0])
        changes: dict[str, Any] = {key: kwargs[key] for key in ("copy", "memory_format") if key in kwargs}
        if name == "cpu":
            target = CPU
        for value in given:
            if isinstance(value, Tensor):
                target, changes["dtype"] = place_of(value), value.dtype
            elif isinstance(value, torch.dtype):
                changes["dtype"] = value
            elif isinstance(value, (str, torch.device)) or (isinstance(value, int) and not isinstance(value, bool)):
                target = _device(value)
        result: Tensor = tensor.to(**changes) if changes else tensor
        if target != place_of(tensor) and result is tensor:
            result = tensor.clone()
        if isinstance(tensor, nn.Parameter) and not isinstance(result, nn.Parameter):
            result = nn.Parameter(result, tensor.requires_grad)  # `nn.Parameter(tensor)` is not seen by a mode
        return result if result is tensor else put(result, target)

    def _met(self, name: str, args: Sequence[Any], tensors: list[Tensor]) -> torch.device:
        """Where the result of a call is; MixedDevicesError for tensors that may not meet."""
        if name in _INDEXING and args and isinstance(args[0], Tensor):
            owner, index, value = args[0], args[1] if len(args) > 1 else (), args[2:]
            by_tensors = False
            for leaf in _tensors(index):
                by_tensors = True
                if place_of(leaf) not in (CPU, place_of(owner)):
                    raise MixedDevicesError(f"{name}: a tensor on {place_of(owner)} by an index on {place_of(leaf)}")
            for leaf in value:
                if by_tensors and isinstance(leaf, Tensor) and leaf.dim() and place_of(leaf) != place_of(owner):
                    raise MixedDevicesError(f"{name}: a value on {place_of(leaf)} into a tensor on {place_of(owner)}")
            return place_of(owner)
        places = {place_of(tensor) for tensor in tensors if tensor.dim() or place_of(tensor) != CPU}
        if len(places) > 1:
            shapes = ", ".join(f"{tuple(tensor.shape)} on {place_of(tensor)}" for tensor in tensors)
            raise MixedDevicesError(f"{name}: tensors of different devices: {shapes}")
        return places.pop() if places else CPU


def _tensors(given: Any) -> Iterator[Tensor]:
    """The tensors among what a function of torch takes or gives."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (tuple, list)):
        for each in given:
            yield from _tensors(each)
    elif isinstance(given, dict):
        yield from _tensors(list(given.values()))


def _device(given: str | int | torch.device) -> torch.device:
    device = torch.device("ipu", given) if isinstance(given, int) else torch.device(given)
    return torch.device(device.type, 0) if device.type not in ("cpu", "meta") and device.index is None else device


def split_model(model: PreTrainedModel, layers: Sequence[torch.device]) -> PreTrainedModel:
    """Spread a model by accelerate, under an entered mode: its layers on these devices, the end with the last."""
    places: dict[str, torch.device] = {}
    for name, _ in model.model.named_children():
        places[f"model.{name}"] = layers[-1] if name == "norm" else layers[0]
    del places["model.layers"]
    places |= {f"model.layers.{number}": device for number, device in enumerate(layers)}
    places["lm_head"] = layers[0 if model.config.tie_word_embeddings else -1]  # with the embedding that it shares
    return dispatch_model(model, places, force_hooks=True)
