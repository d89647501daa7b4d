"""Where a model computes when accelerate has spread its weights over devices, host memory and disk."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def input_device(model: Any) -> torch.device:
    """The device that a model takes token ids on; also when all of its weights wait elsewhere."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    return computing_device(model.get_input_embeddings()) or device


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Inside the block a CUDA device is the present one: where Triton launches, graphs record and events are noted."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def carried(numbers: Tensor, device: torch.device) -> Tensor:
    """A few numbers of the host on a device, without waiting for what that is doing: the driver keeps a copy."""
    return numbers.to(device, non_blocking=True)


def is_spread(model: Any) -> bool:
    """Whether accelerate has put parts of a model in more than one place."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


def computing_device(module: nn.Module) -> torch.device | None:
    """The device that a module computes on, also when its weights wait elsewhere; None where nothing says it."""
    for parameter in module.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            place = getattr(each, "execution_device", None)
            if place is not None:
                return torch.device(place)
    return None


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a module, fetched where it lies in host memory or on the disk until the module computes."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.device.type != "meta":
        return weight.detach()
    from accelerate.utils import align_module_device

    with align_module_device(module):
        fetched = module.weight
        assert isinstance(fetched, Tensor)
        return fetched.detach()


def layer_devices(model: Any) -> dict[int, torch.device]:
    """Where every layer of a model computes, by its number in the cache."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    found: dict[int, torch.device] = {}
    for module in (decoder or model).modules():
        number = getattr(module, "layer_idx", None)
        if isinstance(number, int) and number not in found:
            place = computing_device(module)
            if place is not None:
                found[number] = place
    return found
