"""Whether the fused kernels can run: asked before anything imports Triton."""

from __future__ import annotations

import importlib.util

import torch


def without_triton(device: torch.device) -> str | None:
    """Why the fused kernels cannot run on a device; None where they can."""
    if device.type != "cuda":
        return f"Triton needs a CUDA device, and the model is on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'kvfoundry[kernels]')"
    return None
