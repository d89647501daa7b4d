"""How far a kernel may be from its reference, which computes in float32 on the same inputs."""

from __future__ import annotations

import torch
from torch import Tensor

# Weights and inputs are rounded to the dtype once more than in the reference, sums run in another order.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Largest difference within the tolerance of the dtype, relative to the largest number; same infinities, no NaN."""
    found, expected = found.float(), expected.float()
    assert found.shape == expected.shape
    assert not found.isnan().any()
    finite = expected.isfinite()
    assert torch.equal(found[~finite], expected[~finite])
    scale = max(1e-3, float(expected[finite].abs().max()) if finite.any() else 0.0)
    assert float((found[finite] - expected[finite]).abs().max() if finite.any() else 0.0) <= TOLERANCE[dtype] * scale
