"""Rows as they are: for the side of a cache that a codec leaves alone."""

from dataclasses import dataclass

from torch import Tensor, dtype

from kvfoundry.codecs.base import Codec, Encoded, Parts


@dataclass(frozen=True)
class Plain(Codec):
    """No loss and no saving."""

    def encode(self, rows: Tensor, positions: Tensor, fixed: Parts) -> Encoded:
        return Encoded({"rows": rows})

    def decode(self, rows: Parts, tables: Parts, fixed: Parts, positions: Tensor, dtype: dtype) -> Tensor:
        return rows["rows"].to(dtype)
