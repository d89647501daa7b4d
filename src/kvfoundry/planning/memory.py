"""How much memory a device has: the one at hand, a card by its name, or a size that the user says."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvfoundry.chunks.config import parsed_size
from kvfoundry.errors import DataError, unknown_name

_MIB = 2**20
# What the driver reports for whole cards, in MiB.
CARDS = {
    "t4": 15360,
    "v100-16gb": 16384,
    "v100-32gb": 32768,
    "rtx3090": 24576,
    "rtx4090": 24564,
    "rtx5090": 32607,
    "l4": 23034,
    "a10": 23028,
    "l40s": 46068,
    "a100-40gb": 40960,
    "a100-80gb": 81920,
    "h100": 81559,
    "h200": 143771,
    "b200": 183359,
    "mi300x": 196592,
}


@dataclass(frozen=True)
class Memory:
    """A device by its name, and its bytes. on_gpu: whether models are loaded there in their own dtype."""

    name: str
    nbytes: int
    on_gpu: bool = True


def memory_at_hand() -> Memory:
    """The first CUDA device, or the memory of this machine where there is none."""
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return Memory(found.name, found.total_memory)
    try:
        nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError) as error:
        raise DataError("this system does not say how much memory it has; give a device with --gpu 24GiB.") from error
    return Memory("CPU (this machine's memory)", nbytes, on_gpu=False)


def memory_of(text: str) -> Memory:
    """A device that a user names: a card, or a size with its unit. Raises DataError for anything else."""
    if (found := card(text)) is not None:
        return found
    if re.fullmatch(r"\s*[0-9.]+\s*[a-zA-Z]+\s*", text):
        with suppress(ValueError):
            return Memory(f"a device of {text.strip()}", parsed_size(text))
    raise DataError(f"--gpu takes a size such as 24GiB, or a card: {unknown_name('card', text, CARDS)}")


def card(name: str) -> Memory | None:
    """A well-known card by its name, whatever its case and dashes; None for another name."""
    found = {plain(known): (known, size) for known, size in CARDS.items()}.get(plain(name))
    return None if found is None else Memory(found[0], found[1] * _MIB)


def plain(name: str) -> str:
    """A name without case and separators."""
    return "".join(letter for letter in name.lower() if letter.isalnum())
