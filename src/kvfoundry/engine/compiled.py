"""A model's forward pass through torch.compile, as a step of the engine wants it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvfoundry.rope_layout import rotary_module


def compiled(model: PreTrainedModel) -> Callable[..., Any]:
    """The forward pass, compiled. Cosines and sines of the token's place are computed once in a step.

    Left alone the compiler computes them again in every layer, and those of large angles take long.
    """
    # with this, products of one row become reductions that read weights at full bandwidth
    forward = torch.compile(model.forward, dynamic=False, options={"coordinate_descent_tuning": True})
    rotary = rotary_module(model)
    if rotary is None:
        return forward

    def step(**arguments: Any) -> Any:
        with rotary.register_forward_hook(_settled):  # looked at when the step is traced
            return forward(**arguments)

    return step


def _settled(module: nn.Module, arguments: Any, tables: Any) -> Any:
    if isinstance(tables, tuple) and all(isinstance(table, Tensor) for table in tables):
        return tuple(_settle(table) for table in tables)
    return tables


@torch.library.custom_op("kvfoundry::settle", mutates_args=())
def _settle(tensor: Tensor) -> Tensor:
    """The tensor, in memory: what a compiler does not look into it does not compute twice."""
    return tensor.clone()


@_settle.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)
