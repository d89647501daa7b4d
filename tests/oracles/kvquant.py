"""Driver for recordings of KVQuant: thresholds, masks, codes and numbers from the codec's own functions."""

from __future__ import annotations

import torch
from torch import Tensor

import kvfoundry
from kvfoundry.codecs import kvquant
from kvfoundry.codecs.nuq import Levels, fit_levels, mean_square, picked
from kvfoundry.rope import Rope

from .cases import Case
from .mapping import Claim, Unmapped, recipe_for


def replay(case: Case, claim: Claim) -> None:
    x = _tensor(case, "x")
    method = kvfoundry.Method.parse(recipe_for(case, claim, x.shape[0]).spec)
    assert method.codec is not None
    keys, values = method.codec.keys, method.codec.values
    assert isinstance(keys, kvquant.KVQuantKeys) and isinstance(values, kvquant.KVQuantValues)
    per_channel = case.tensor("upper") is not None or case.parameters.get("axis") == "channel"
    if per_channel and case.tensor("upper") is not None:
        _static(case, keys, x)
    elif per_channel:
        _online(case, values, x.T, transposed=True)
    else:
        _online(case, values, x, transposed=False)


def _tensor(case: Case, name: str) -> Tensor:
    found = case.tensor(name)
    if found is None:
        raise Unmapped(f"the recording has no tensor {name!r}")
    return found


def _static(case: Case, codec: kvquant.KVQuantKeys, x: Tensor) -> None:
    """Per channel, thresholds from calibration."""
    sample, lower, upper = _tensor(case, "calib"), _tensor(case, "lower"), _tensor(case, "upper")
    bounds = kvquant.channel_bounds(sample.T, codec.outliers)
    atol = float(case.entry["tolerance"].get("thresholds_atol", 1e-5))
    for ours, recorded in zip(bounds, (lower, upper), strict=True):
        torch.testing.assert_close(ours, recorded, rtol=1e-6, atol=atol)
    # Where the tolerance speaks of float16, thresholds, offset and range were computed in it.
    dtype = torch.float16 if isinstance(case.entry["tolerance"]["dequant_atol"], str) else torch.float32
    affine = kvquant.Affine.between(lower.to(dtype), upper.to(dtype))
    affine = kvquant.Affine(affine.offset.float(), affine.range.float())
    outliers = kvquant.screened(x, lower.to(dtype), upper.to(dtype))
    inner = ~kvquant.screened(sample, lower.to(dtype), upper.to(dtype))
    levels = Levels.plain(_tensor(case, "centroids"))
    z = affine.normalized(sample)[inner]
    if codec.q_norm:
        normed = levels.normed(z)
        scale, shift = _tensor(case, "norm_scale"), _tensor(case, "norm_offset")
        atol = float(case.entry["tolerance"]["norm_atol"])
        torch.testing.assert_close(normed.value, levels.code * scale + shift, rtol=0, atol=2 * atol)
        levels = normed
    _compare_fit(case, codec.bits, z, inner)
    _compare(case, x, outliers, affine, levels, codec.whole)


def _compare_fit(case: Case, bits: int, z: Tensor, inner: Tensor) -> None:
    """Our own k-means is at most 5 % worse than the recorded one."""
    fisher, centroids = case.tensor("fisher"), _tensor(case, "centroids")
    weights = None if fisher is None else fisher[inner]
    ours = mean_square(z, fit_levels(z, 2**bits, weights), weights)
    assert ours <= 1.05 * mean_square(z, centroids.sort().values, weights)
    recorded = case.entry["scalars"].get("kmeans_weighted_msd")
    assert recorded is None or ours <= 1.05 * recorded


def _online(case: Case, codec: kvquant.KVQuantValues, rows: Tensor, *, transposed: bool) -> None:
    """Thresholds, offset and range from the row itself."""
    outliers = kvquant.exact_outliers(rows, codec.outliers, inclusive=True)
    recorded = case.tensor("outlier_mask")
    if recorded is not None:
        recorded = (recorded.T if transposed else recorded).bool()
        lower, upper = kvquant.percentile_bounds(rows, codec.outliers)
        inclusive = (rows <= lower[:, None]) | (rows >= upper[:, None])
        # Equal numbers on a threshold are all outliers there, and exactly as many as asked for here.
        tied = inclusive.sum(dim=-1) != outliers.sum(dim=-1)
        same = (outliers == recorded).all(dim=-1)
        assert bool((same | tied | (torch.arange(len(rows)) < codec.whole)).all())
        outliers = torch.where(tied[:, None], inclusive, outliers)
    low, high = kvquant.inner_bounds(rows, outliers)
    for ours, name in ((low, "row_min"), (high, "row_max")):
        wanted = case.tensor(name)
        if wanted is not None:
            torch.testing.assert_close(ours[codec.whole :], wanted[codec.whole :], rtol=0, atol=1e-6)
    affine = kvquant.Affine.between(low[:, None], high[:, None])
    if codec.levels == "grid":
        affine = kvquant.whole_zero_point(affine, codec.bits)
    if codec.levels == "fitted":
        levels = Levels.plain(_tensor(case, "centroids"))
        sample = _tensor(case, "calib")
        beyond = kvquant.exact_outliers(sample, codec.outliers, inclusive=True)
        own = kvquant.Affine.between(*(bound[:, None] for bound in kvquant.inner_bounds(sample, beyond)))
        _compare_fit(case, codec.bits, own.normalized(sample)[~beyond], ~beyond)
    else:
        levels = Levels.plain(kvquant.uniform_levels(codec.bits))
    _compare(case, rows, outliers, affine, levels, codec.whole, transposed=transposed)


def _compare(
    case: Case,
    rows: Tensor,
    outliers: Tensor,
    affine: kvquant.Affine,
    levels: Levels,
    first: int,
    *,
    transposed: bool = False,
) -> None:
    """Mask, codes and numbers of rows against the recording."""

    def recorded(name: str) -> Tensor | None:
        tensor = case.tensor(name)
        return tensor.T if tensor is not None and transposed else tensor

    encoded = kvquant.encode(rows, affine, levels)
    restored = torch.where(outliers, rows, kvquant.decode(encoded, affine, levels))
    restored[:first] = rows[:first]
    mask, codes = recorded("outlier_mask"), recorded("codes")
    if mask is not None:
        assert torch.equal(mask[first:].bool(), outliers[first:]), "outliers"
    if codes is not None:
        dense = codes != 255  # the recorded table is not sorted
        chosen = _tensor(case, "centroids")[codes.long().clamp(max=levels.code.numel() - 1)]
        z = affine.normalized(rows)
        same = picked(levels.code, encoded)
        tie = ((z - chosen).abs() - (z - same).abs()).abs() < 1e-6
        assert bool(((same == chosen) | tie)[dense].all()), "codes"
    tolerance = case.entry["tolerance"]["dequant_atol"]
    atol = tolerance if isinstance(tolerance, float) else 1e-4  # the figure for float16 offset and range
    wanted = recorded("dequant")
    assert wanted is not None
    torch.testing.assert_close(restored, wanted, rtol=0, atol=atol)
    _compare_rotated(case, rows, restored, atol)


def _compare_rotated(case: Case, rows: Tensor, restored: Tensor, atol: float) -> None:
    """What attention sees: keys turned to their positions after they were restored."""
    if case.tensor("rope_x") is None:
        return
    parameters = case.parameters
    heads, dim, base = parameters["heads"], parameters["head_dim"], parameters["rope_theta"]
    rope = _rope(heads, dim, base)
    positions = torch.arange(len(rows)).view(1, 1, -1)
    for ours, name in ((rows, "rope_x"), (restored, "rope_dequant")):
        keys = ours.view(1, len(rows), heads, dim).transpose(1, 2)
        turned = rope.rotate(keys, positions).transpose(1, 2).reshape(rows.shape)
        # cos and sin come from another order of operations; large channels carry that.
        torch.testing.assert_close(turned, _tensor(case, name), rtol=1e-5, atol=max(atol, 1e-4))
        torch.testing.assert_close(rope.unrotate(rope.rotate(keys, positions), positions), keys, rtol=1e-5, atol=1e-5)


def _rope(heads: int, dim: int, base: float) -> Rope:
    from tiny_models import build

    sizes = {"hidden_size": heads * dim, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": dim}
    model = build("llama", **sizes, rope_parameters={"rope_type": "default", "rope_theta": base})
    return Rope.of(model, 0)
