"""Where a model computes when accelerate has spread its weights over devices, host memory and disk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def input_device(model: Any) -> torch.device:
    """The device that a model takes token ids on; also when all of its weights wait elsewhere."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    place = getattr(hook, "execution_device", None)
    return device if place is None else torch.device(place)


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
