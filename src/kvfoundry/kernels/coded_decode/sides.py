"""How the kernel over codes reads one side: what of it is compiled in, and its codes as words."""

from __future__ import annotations

from typing import Any

import torch

from kvfoundry.codecs.grouped import offset
from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.coded_decode.codes import Codes
from kvfoundry.kernels.triton_support import interpreted, next_power

# Rows of a tile at least: a matrix product of the tensor cores takes no fewer.
LEAST = 16

# How a decoded number follows from its code: code * scale + minimum, (code - zero) * scale, float8 * scale.
_MINIMUM, _ZERO, _FLOAT8 = 0, 1, 2

# Bits of the pattern of a base that codes may fill: those of the mantissa of bfloat16.
_MANTISSA = 7
# The smallest number is 2 ** -bits, and what meets such numbers is made larger by so many bits: products then are far
# from the ends of float32. float16's are, as they are.
TINY_BITS = {torch.bfloat16: 133, torch.float16: 24}
LIFT_BITS = {torch.bfloat16: 60, torch.float16: 0}
# So many powers of two may a weight be above one before all sums are set against a new peak; float16 ends at 2 ** 16.
SLACK = 10


def side_terms(name: str, side: Codes, dtype: torch.dtype) -> dict[str, Any]:
    """How one side is read, as arguments of the kernel, and its codes as words.

    TINY: scales go onto the other factor, so codes are read as subnormal numbers. ROOM: bits of a word that are read
    without being moved. PER: entries of the tables in one load.
    """
    size = side.codes.shape[3]
    if side.bits not in (1, 2, 4, 8):
        raise KVFoundryError(f"the fused kernel reads codes of 1, 2, 4 and 8 bits, got {side.bits}.")
    if side.codes.stride(3) != 1 or side.scale.stride(3) != 1:
        raise KVFoundryError("the last dimension of codes and scales must be dense.")
    if side.minimum is not None and side.minimum.stride() != side.scale.stride():
        raise KVFoundryError("scales and minima of codes must be laid out alike.")
    # 16 bits at a time, as long as that leaves at least 16 words for a matrix product
    even = all(stride % 2 == 0 for stride in side.codes.stride()[:3]) and side.codes.storage_offset() % 2 == 0
    wide = side.bits < 8 and size % 2 == 0 and size // 2 > 8 and even
    view = side.codes.view(torch.int16) if wide else side.codes
    places = (16 if wide else 8) // side.bits
    if side.along == "channels" and side.group % places and side.group < side.dim:
        raise KVFoundryError(f"groups of {side.group} channels are no whole number of {places} codes.")
    slices = -(-side.dim // side.group) if side.along == "channels" else 1
    base = 0
    if side.bits < 8:
        base = {torch.bfloat16: 128, torch.float16: 1024}.get(dtype, 0)
    kind = {"zero_point": _ZERO, "float8": _FLOAT8}.get(side.mode, _MINIMUM)
    if side.along == "tokens":
        folded, most = name == "KEY" and side.group >= LEAST, places
    else:
        folded, most = name == "VALUE", slices
    tiny = folded and base > 0
    return {
        f"{name}_VIEW": view,
        f"{name}_BITS": side.bits,
        f"{name}_PLACES": places,
        f"{name}_WORDS": view.shape[3],
        f"{name}_GROUP": side.group,
        f"{name}_TOKENS": side.along == "tokens",
        f"{name}_KIND": kind,
        f"{name}_PAIRS": wide and base > 0 and not interpreted(),
        f"{name}_SLICES": slices,
        f"{name}_ROOM": _MANTISSA // side.bits * side.bits if tiny else side.bits,
        f"{name}_PER": _entries_per_load(side, most),
        f"{name}_TINY": tiny,
        f"{name}_BASE": 0.0 if tiny else float(base),
        f"{name}_OFFSET": 0 if side.mode == "float8" else offset(side.bits, side.mode),
        f"{name}_HAS_MINIMUM": side.minimum is not None,
    }


def chunks_of(words: int, slices: int) -> int:
    """Into how many parts, each of some words and whole slices, the words of a row of values are cut."""
    whole = next_power(words, 16) == words

    return max(
        number for number in (1, 2, 4, 8) if number == 1 or (whole and slices % number == 0 and words // number >= 8)
    )


def _entries_per_load(side: Codes, most: int) -> int:
    """How many neighbouring entries of the tables are loaded as one word of at most 64 bits."""
    tables = [side.scale] if side.minimum is None else [side.scale, side.minimum]

    def fits(number: int) -> bool:
        whole = all(
            length % number == 0
            for table in tables
            for length in (table.shape[3], *table.stride()[:3], table.storage_offset())
        )
        return whole and most % number == 0 and all(table.element_size() * number <= 8 for table in tables)

    return next(number for number in (8, 4, 2, 1) if fits(number))
