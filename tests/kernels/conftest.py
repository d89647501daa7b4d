"""Kernels run on the GPU where there is one, else in Triton's interpreter on CPU tensors (a tiny problem each)."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

_ON_GPU = torch.cuda.is_available()
_INSTALLED = importlib.util.find_spec("triton") is not None


def _why_not() -> str | None:
    if not _INSTALLED:
        return "Triton is not installed (extra `kernels`)"
    if _ON_GPU:
        return None
    import triton

    if not triton.knobs.runtime.interpret:
        return "no GPU, and Triton was imported before it could be told to interpret: set TRITON_INTERPRET=1"
    return None


@pytest.fixture(autouse=True)
def _whole_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gaps of Triton 3.6's interpreter, filled for the tests.

    It makes numbers of arrays of one element by int(), which numpy 2.4 no longer does, and it calculates with the bit
    patterns of bfloat16 instead of the numbers and cuts where it should round.
    """
    if _why_not() is not None or _ON_GPU:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle_of = interpreter.InterpreterBuilder, interpreter.TensorHandle
    patch, dot, binary = interpreter._patch_lang_tensor, builder.create_dot, builder.binary_op
    casts = {name: getattr(builder, name) for name in ("cast_impl", "create_fp_to_fp")}
    rounding = {tl.bfloat16: (torch.bfloat16, torch.uint16), tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8)}

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return handle_of(bits.view(np.float32), tl.float32)

    def exact_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, widened(a), widened(b), *others)

    def rounded(data: Any, to: Any) -> Any:
        dtype, bits = rounding[to]
        found = torch.from_numpy(np.array(data, dtype=np.float32, ndmin=1)).to(dtype).view(bits).numpy()
        return handle_of(found.reshape(np.shape(data)), to)

    def exact_binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16:
            return binary(self, lhs, rhs, op)
        result = op(widened(lhs).data, widened(rhs).data)
        return handle_of(result, tl.int1) if result.dtype == bool else rounded(result, tl.bfloat16)

    def exact_cast(name: str) -> Any:
        def cast(self: Any, source: Any, to: Any, *others: Any) -> Any:
            if source.dtype.scalar == tl.float32 and to.scalar in rounding:
                return rounded(source.data, to.scalar)
            return casts[name](self, source, to, *others)

        return cast

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(builder, "create_dot", exact_dot)
    monkeypatch.setattr(builder, "binary_op", exact_binary)
    for name in casts:
        monkeypatch.setattr(builder, name, exact_cast(name))


@pytest.fixture
def device() -> torch.device:
    """Where kernels can run; skips the test, saying why, where they cannot."""
    reason = _why_not()
    if reason is not None:
        pytest.skip(reason)
    return torch.device("cuda" if _ON_GPU else "cpu")
