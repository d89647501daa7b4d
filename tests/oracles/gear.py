"""Driver for recordings of GEAR: outliers, base and low-rank part, with the recorded start of the iteration."""

from __future__ import annotations

import torch
from torch import Tensor

import kvfoundry
from kvfoundry.codecs import gear
from kvfoundry.codecs.grouped import dequantize, quantize

from .cases import Case
from .mapping import Claim, recipe_for


def replay(case: Case, claim: Claim) -> None:
    x, parameters = case.tensor("x"), case.parameters
    assert x is not None
    method = kvfoundry.Method.parse(recipe_for(case, claim, x.shape[2]).spec)
    assert method.codec is not None
    codec = method.codec.keys if parameters["kind"] == "key" else method.codec.values
    assert isinstance(codec, gear.GearKeys if parameters["kind"] == "key" else gear.GearValues)
    tolerance = case.entry["tolerance"]
    quantized, outliers = _quantized(case, x, codec.bits)
    torch.testing.assert_close(quantized, case.tensor("quantized"), rtol=0, atol=tolerance["quantized_atol"])
    mask, start = case.tensor("outlier_mask"), case.tensor("p_init")
    if mask is not None:
        assert torch.equal(outliers, mask.bool()), "outliers"
    _close(_error(quantized, x), case.entry.get("scalars", {}).get("rel_error_quant_and_outliers"), tolerance)
    if start is None:
        assert codec.rank == 0
        return
    error = x - quantized
    left, right = gear.low_rank(error, start, codec.loops)
    approximated = left @ right.mT
    torch.testing.assert_close(quantized + approximated, case.tensor("result"), rtol=0, atol=tolerance["result_atol"])
    scalars = case.entry["scalars"]
    _close(_error(quantized + approximated, x), scalars["rel_error_full"], tolerance)
    # From our own start: the recording allows 3 % for another start. One round finds no good span from any start.
    if codec.loops > 1:
        own = gear.start_matrix(x.shape[-1], codec.rank).expand(*error.shape[:2], -1, -1)
        left, right = gear.low_rank(error, own, codec.loops)
        assert _error(quantized + left @ right.mT, x) <= 1.03 * scalars["rel_error_full"]


def _quantized(case: Case, x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Base with outliers put back, and the outliers, both [batch, heads, tokens, dim].

    Rows as recorded: a channel over the tokens, or a token over the channels of all heads. What does not fill a group
    stays as it is.
    """
    parameters = case.parameters
    batch, heads, tokens, dim = x.shape
    keys = parameters["kind"] == "key"
    rows = x.transpose(2, 3).flatten(1, 2) if keys else x.transpose(1, 2).flatten(2)
    base, mask = gear.without_outliers(rows, parameters["outliers_per_side_per_row"])
    whole = rows.shape[-1] // parameters["group_size"] * parameters["group_size"]
    groups = base[..., :whole].unflatten(-1, (-1, parameters["group_size"]))
    restored = _grouped(groups, bits, parameters["levels"]).flatten(-2)
    restored = torch.cat([restored, base[..., whole:]], dim=-1)
    restored = torch.where(mask, rows, restored)

    def back(rows: Tensor) -> Tensor:
        if keys:
            return rows.view(batch, heads, dim, tokens).transpose(2, 3)
        return rows.view(batch, tokens, heads, dim).transpose(1, 2)

    return back(restored), back(mask)


def _grouped(groups: Tensor, bits: int, levels: int) -> Tensor:
    if levels == 2**bits - 1:
        found = quantize(groups, bits, "asymmetric", dim=-1)
        return dequantize(found.codes, found.scale, found.minimum, bits, "asymmetric")
    # The published code has bits^2 - 1 levels where it has outliers; that is not offered, only recorded.
    assert levels == bits**2 - 1
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    scale = (high - low) / levels
    return ((groups - low) / scale).round() * scale + low


def _error(ours: Tensor, x: Tensor) -> float:
    return float((ours - x).norm() / x.norm())


def _close(ours: float, recorded: float | None, tolerance: dict[str, float]) -> None:
    assert recorded is None or abs(ours - recorded) <= tolerance["rel_error_abs"], f"{ours} against {recorded}"
