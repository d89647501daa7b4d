"""Quantize rows in groups and pack their codes: `naive` says what is computed, `fused` does it in one launch."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kvfoundry.kernels.available import without_triton
from kvfoundry.kernels.coded_decode.codes import Codes
from kvfoundry.kernels.encode_rows import naive
from kvfoundry.kernels.encode_rows.form import Form

__all__ = ["Form", "encode", "encoded"]


def encoded(rows: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `naive.encoded`, on a GPU by the kernel where it writes such codes."""
    written: tuple[Tensor, Tensor, Tensor | None] = _twin(rows.device, form, rows.dtype).encoded(rows, form)
    return written


def encode(rows: Tensor, into: Codes, at: Tensor) -> None:
    """As `naive.encode`, on a GPU by the kernel where it writes such codes."""
    _twin(rows.device, Form.of(into), rows.dtype).encode(rows, into, at)


def _twin(device: torch.device, form: Form, dtype: torch.dtype) -> ModuleType:
    if without_triton(device) is not None or form.refusal(dtype) is not None:
        return naive
    from kvfoundry.kernels.encode_rows import fused

    return fused
