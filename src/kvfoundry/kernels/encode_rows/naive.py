"""Reference encoding: the arithmetic of `codecs.grouped`, codes side by side as in `codecs.packing`."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.codecs.grouped import in_groups, quantize
from kvfoundry.codecs.packing import pack
from kvfoundry.kernels.coded_decode.codes import Codes
from kvfoundry.kernels.encode_rows.form import Form

# The largest number of e4m3.
_LARGEST = 448.0


def encoded(rows: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes uint8 [..., n, bytes] of rows [..., n, dim], and scale and minimum (None without one) of their groups.

    scale: [..., n, groups] where groups are channels of one row, [..., n / group, dim] where they are `group` rows of
    one channel; then n is a multiple of `group`. minimum alike.
    """
    if form.mode == "float8":
        return _float8(rows, form)
    if form.along == "tokens":
        found = quantize(rows.unflatten(-2, (-1, form.group)), form.bits, form.mode, dim=-2)
        codes, dim = found.codes.flatten(-3, -2), -2
    else:
        found = quantize(in_groups(rows, form.group), form.bits, form.mode, dim=-1)
        codes, dim = found.codes.flatten(-2)[..., : form.dim], -1
    minimum = None if found.minimum is None else found.minimum.squeeze(dim)
    return pack(codes, form.bits), found.scale.squeeze(dim), minimum


def _float8(rows: Tensor, form: Form) -> tuple[Tensor, Tensor, None]:
    groups = in_groups(rows, form.group)
    # Rounding the scale down to the dtype of the rows must not push the largest number beyond 448: it is clamped.
    scale = groups.abs().amax(dim=-1, keepdim=True) / _LARGEST
    steps = groups.float() / torch.where(scale == 0, 1.0, scale.float())
    codes = steps.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.flatten(-2)[..., : form.dim].contiguous(), scale[..., 0], None


def encode(rows: Tensor, into: Codes, at: Tensor) -> None:
    """Write all `rows` [batch, heads, n, dim] of every head as codes from row `at` [batch, heads] on.

    Where `at` is negative nothing is written. With groups of tokens, n and at are multiples of the group.
    """
    heads = (at.flatten() >= 0).nonzero()[:, 0]
    first = at.flatten()[heads].long()
    for target, part in zip(
        (into.codes, into.scale, into.minimum), encoded(rows.flatten(0, 1)[heads], Form.of(into)), strict=True
    ):
        if target is None or part is None:
            continue
        number = first // (rows.shape[2] // part.shape[1])
        place = number[:, None] + torch.arange(part.shape[1], device=rows.device)
        target.flatten(0, 1)[heads[:, None], place] = part
