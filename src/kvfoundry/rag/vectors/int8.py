"""Rows of vectors in one byte a number: each row has its own scale, so that its largest number is 127."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Vectors as they are stored.

    Attributes:
        codes: [rows, dimensions], int8, or float32 where nothing is rounded.
        scales: [rows], float32: what a code is multiplied with; None where nothing is rounded.
    """

    codes: Tensor
    scales: Tensor | None

    @classmethod
    def of(cls, vectors: Tensor, rounded: bool) -> Rows:
        """Of float vectors [rows, dimensions]."""
        if not rounded:
            return cls(vectors.float().contiguous(), None)
        scales = vectors.abs().amax(1).clamp_min(1e-12) / 127
        return cls((vectors / scales[:, None]).round().to(torch.int8), scales)

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def take(self, rows: Tensor) -> Rows:
        """Some of the rows, in the order asked for."""
        return Rows(self.codes[rows], None if self.scales is None else self.scales[rows])

    def floats(self) -> Tensor:
        """The vectors that are stored, as float32."""
        return self.codes if self.scales is None else self.codes.float() * self.scales[:, None]

    def products(self, queries: Tensor) -> Tensor:
        """Inner products [queries, rows] with float queries [queries, dimensions]."""
        found = queries @ self.codes.float().T
        return found if self.scales is None else found * self.scales

    @staticmethod
    def joined(parts: list[Rows]) -> Rows:
        """The rows of several, one after the other."""
        scales = [part.scales for part in parts if part.scales is not None]
        return Rows(torch.cat([part.codes for part in parts]), torch.cat(scales) if scales else None)
