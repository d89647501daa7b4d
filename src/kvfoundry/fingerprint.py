"""A number that changes when any weight does: exact, the same on every device and in every process, and quick.

Integer arithmetic on the bits of the tensors, eight bytes at a time: order does not matter to it, so a GPU and a CPU
agree, and it runs at the speed of memory. It is made against mistakes, not against forgers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial

import torch
from torch import Tensor, nn

# Lanes of eight bytes that share one row of multipliers, and rows that are worked on at a time.
_WIDTH, _ROWS = 1 << 13, 128
_ODD = 0x1E3779B97F4A7C15


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every weight and stored buffer of a model, each storage once, in the model's order.

    What accelerate keeps on the host or on disk until a module computes is fetched from there.
    """
    seen: set[tuple[object, ...]] = set()
    waiting = dict(_waiting(model))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        if tensor.device.type == "meta" and name in waiting:
            tensor = waiting[name]()
        place = (tensor.data_ptr(), tensor.storage_offset(), tensor.shape)
        if tensor.device.type == "meta" or tensor.numel() == 0 or place not in seen:
            seen.add(place)
            yield name, tensor.detach()


def _waiting(model: nn.Module) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Name of every tensor that accelerate has put aside, and how it is fetched."""
    for prefix, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            aside = getattr(each, "weights_map", None)
            if aside is None:
                continue
            deep = bool(getattr(each, "place_submodules", False))
            for name, _ in (*module.named_parameters(recurse=deep), *module.named_buffers(recurse=deep)):
                yield f"{prefix}.{name}" if prefix else name, partial(aside.__getitem__, name)


def fingerprint(
    tensors: Iterable[tuple[str, Tensor]], *, sample: int | None = None, dtype: torch.dtype | None = None
) -> str:
    """Hex digest, 64 characters, of names, shapes, dtypes and contents.

    sample: only the first so many numbers of every tensor. dtype: numbers are rounded to this dtype first and the
    stored one is not told, so one checkpoint has one digest however it was loaded. A tensor that is not in memory (meta
    device) counts by name and shape.
    """
    told: list[str] = []
    sums: dict[torch.device, list[Tensor]] = {}
    for name, tensor in tensors:
        part = tensor if sample is None else tensor.reshape(-1)[:sample]
        if dtype is not None and tensor.dtype.is_floating_point:
            part = part.to(dtype)
        kind = str(part.dtype)
        if tensor.device.type == "meta":
            told.append(f"{name} {tuple(tensor.shape)} {kind} absent")
            continue
        found = sums.setdefault(tensor.device, [])
        told.append(f"{name} {tuple(tensor.shape)} {kind} {tensor.device}:{len(found)}")
        found.append(bit_sum(part))
    known = {f"{device}:{i}": n for device, each in sums.items() for i, n in enumerate(torch.stack(each).tolist())}
    digest = hashlib.sha256()
    for line in told:
        head, _, place = line.rpartition(" ")
        digest.update(f"{head} {known.get(place, place)}\n".encode())
    return digest.hexdigest()


def bit_sum(tensor: Tensor) -> Tensor:
    """The bits of a tensor in one int64 on its device: any single change shows.

    With lanes x of eight bytes and odd multipliers w, v: sum over rows r of v_r sum over lanes i of w_i mix(x_ri),
    modulo 2^64; mix brings high bits down first, or changed signs would cancel in pairs.
    """
    lanes = _lanes(tensor)
    sums = []
    whole = lanes.numel() // _WIDTH * _WIDTH
    for rows in (*lanes[:whole].view(-1, _WIDTH).split(_ROWS), lanes[whole:][None]):
        mixed = rows >> 31
        mixed ^= rows
        mixed *= _multipliers(tensor.device, _WIDTH)[: rows.shape[1]]
        sums.append(mixed.sum(dim=1))
    row_sums = torch.cat(sums)
    row_sums = row_sums ^ (row_sums >> 29)
    return (row_sums * ((torch.arange(1, len(row_sums) + 1, device=tensor.device) * (2 * _ODD)) | 1)).sum()


@cache
def _multipliers(device: torch.device, count: int) -> Tensor:
    with torch.inference_mode(False):
        return (torch.arange(count, device=device) * (2 * _ODD)) | 1


def _lanes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as int64, zeros behind."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    rest = -flat.numel() % 8
    if rest or flat.storage_offset() % 8:
        flat = torch.cat([flat, flat.new_zeros(rest)])
    return flat.view(torch.int64)
