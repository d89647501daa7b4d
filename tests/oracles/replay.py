"""Drivers: replay one recorded case through our methods and compare what is kept, gathered and computed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import kvfoundry
from kvfoundry.selection.draws import GivenDraws
from kvfoundry.selection.scores.given import GivenScores

from .cases import Case
from .mapping import Claim, Recipe, Unmapped, recipe_for


def replay(case: Case, claim: Claim) -> None:
    """Run the case with the driver of its claim; AssertionError names the first difference."""
    from . import blends, channels, codes, gear, kvquant, layer_pairs, merges, pages, selectors

    drivers = {"tensors": _tensors, "positions": _positions, "steps": _steps, "model": _model}
    drivers |= {"selector": selectors.replay, "pages": pages.replay}
    drivers |= {"one step": merges.replay_step, "events": merges.replay_events, "decoding": _decoding}
    drivers |= dict.fromkeys(("plain codes", "codes", "element groups"), codes.replay)
    drivers |= {"kvquant": kvquant.replay, "gear": gear.replay}
    drivers |= {"channels": channels.replay_tensors, "channels of a model": channels.replay_model}
    drivers |= {"layer pair": layer_pairs.replay, "blend": blends.replay}
    drivers[claim.driver](case, claim)


# --- one layer, tensors given -----------------------------------------------------------------------------------------


def _tensors(case: Case, claim: Claim) -> None:
    inputs = case.inputs()
    if inputs is None:
        raise Unmapped("the recording names no input tensors")
    query, key, value = inputs["q"], inputs["k"], inputs["v"]
    recipe = recipe_for(case, claim, key.shape[2])
    layer = _compress(recipe, query, key, value, _drawn(case, claim, key.shape[2]))
    recorded = _recorded_indices(case)
    positions, lengths, keys, values = layer.positions, layer.lengths, layer.keys, layer.values
    repeat = recorded.shape[1] // positions.shape[1]  # a layer that drops nothing keeps its KV heads under query_head
    positions, lengths, keys, values = (t.repeat_interleave(repeat, dim=1) for t in (positions, lengths, keys, values))
    _compare_kept(
        positions,
        lengths,
        recorded,
        tie_free=_with_batch(case.tensor("tie_free"), 2),
        scores=case.tensor(claim.scores),
        lowest=claim.lowest,
        tolerance=case.tolerance("scores"),
        same_counts=case.entry.get("counts_unambiguous") is not False,
        where=recipe.spec,
    )
    for name, ours, source in (("keys", keys, key), ("values", values, value)):
        if name not in claim.merged:
            _compare_gather(positions, ours, source, f"{name} of {recipe.spec}")
        rows = slice(0, 1) if claim.draws is not None else slice(None)  # draws are recorded for one batch row
        _compare_rows(case, name, positions, ours, recorded, rows)


def _recorded_indices(case: Case) -> Tensor:
    """Recorded positions [batch, heads, rows], -1 behind a head that keeps fewer than the widest."""
    recorded, flat, lengths = (case.tensor(name) for name in ("indices", "indices_flat", "head_lens"))
    if recorded is not None:
        return recorded
    assert flat is not None and lengths is not None, "the recording has no indices"
    return _padded(flat.long(), lengths, fill=-1)


def _padded(flat: Tensor, lengths: Tensor, fill: float) -> Tensor:
    """Rows of head after head, [sum(lengths), ...], as a rectangle [1, heads, widest, ...]."""
    heads = flat.split(lengths.tolist())
    return torch.nn.utils.rnn.pad_sequence(list(heads), batch_first=True, padding_value=fill)[None]


def _with_batch(tensor: Tensor | None, dims: int) -> Tensor | None:
    """Recordings for a batch of one may leave the batch dimension out."""
    return tensor[None] if tensor is not None and tensor.dim() < dims else tensor


def _positions(case: Case, claim: Claim) -> None:
    """A method of positions alone: any tensors do, and every head must keep the recorded tokens."""
    tokens = case.parameters["seq_len"]
    recipe = recipe_for(case, claim, tokens)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, tokens, 8, generator=generator) for heads in (4, 2, 2))
    layer = _compress(recipe, query, key, value)
    recorded = case.tensor("indices")
    assert recorded is not None, "the recording has no indices"
    _compare_kept(layer.positions, layer.lengths, recorded.expand(1, 2, -1), where=recipe.spec)
    _compare_gather(layer.positions, layer.keys, key, f"keys of {recipe.spec}")


def _drawn(case: Case, claim: Claim, tokens: int) -> GivenDraws | None:
    return None if claim.draws is None else GivenDraws((claim.draws(case, tokens),))


def _compress(recipe: Recipe, query: Tensor, key: Tensor, value: Tensor, draws: GivenDraws | None = None) -> Any:
    method = kvfoundry.Method.parse(recipe.spec)
    if draws is not None:
        repeated = GivenDraws(tuple(u.expand(query.shape[0], -1, -1) for u in draws.per_layer))
        method = method.replace(dispose=replace(method.dispose, draws=repeated))
    return method.compress(query, key, value, layer_idx=recipe.layer_idx, num_layers=recipe.num_layers)


def _compare_kept(
    positions: Tensor,
    lengths: Tensor,
    recorded: Tensor,
    *,
    tie_free: Tensor | None = None,
    scores: Tensor | None = None,
    lowest: bool = False,
    tolerance: dict[str, float] | None = None,
    same_counts: bool = True,
    where: str,
) -> None:
    """Kept sets per batch row and head, [batch, heads, rows] each.

    Where a tie stands at the boundary the recorded set is one of many: then the scores of what we chose must be the
    best ones, and every token that was not ranked (the protected window) must be there. same_counts is False where
    such a tie decides which of two heads gets a row.
    """
    assert positions.shape[:2] == recorded.shape[:2], f"{where}: heads {positions.shape} against {recorded.shape}"
    for batch, head in torch.cartesian_prod(torch.arange(recorded.shape[0]), torch.arange(recorded.shape[1])).tolist():
        place = f"{where}, batch row {batch}, head {head}"
        ours = positions[batch, head][positions[batch, head] >= 0]
        wanted = recorded[batch, head].long().sort().values
        wanted = wanted[wanted >= 0]
        assert ours.numel() == ours.unique().numel() == int(lengths[batch, head]), f"{place}: {ours.tolist()}"
        assert not same_counts or ours.numel() == wanted.numel(), (
            f"{place}: {ours.numel()} rows kept, recorded are {wanted.numel()}"
        )
        if scores is None or tie_free is None or (same_counts and bool(tie_free[batch, head])):
            assert set(ours.tolist()) == set(wanted.tolist()), (
                f"{place}: kept only by us {sorted(set(ours.tolist()) - set(wanted.tolist()))}, "
                f"only recorded {sorted(set(wanted.tolist()) - set(ours.tolist()))}"
            )
            continue
        ranked = scores[batch, head]
        chosen, unranked = ours[ours < ranked.numel()], wanted[wanted >= ranked.numel()]
        assert set(unranked.tolist()) <= set(ours.tolist()), f"{place}: a protected token is gone"
        best = ranked.topk(chosen.numel(), largest=not lowest).values.sort().values
        assert tolerance is not None
        torch.testing.assert_close(ranked[chosen].sort().values, best, **tolerance, msg=lambda m, p=place: f"{p}: {m}")


def _compare_gather(positions: Tensor, rows: Tensor, source: Tensor, where: str) -> None:
    """Stored rows [batch, heads, rows, dim] are bitwise the input rows at their positions."""
    source = source.repeat_interleave(rows.shape[1] // source.shape[1], dim=1)
    index = positions.clamp(min=0)[..., None].expand(-1, -1, -1, source.shape[-1])
    valid = (positions >= 0)[..., None]
    assert torch.equal(rows * valid, source.gather(2, index) * valid), f"{where}: not a copy of the rows it stands for"


def _compare_rows(
    case: Case, name: str, positions: Tensor, ours: Tensor, recorded: Tensor, rows: slice = slice(None)
) -> None:
    """Recorded output rows against ours, both in ascending order of position, in heads without ties."""
    output, tie_free = case.tensor(name), _with_batch(case.tensor("tie_free"), 2)
    flat, lengths = case.tensor(f"{name}_flat"), case.tensor("head_lens")
    if output is None and flat is not None and lengths is not None:
        output = _padded(flat, lengths, fill=0.0)
    if output is None:
        return
    same = tie_free.bool() if tie_free is not None else torch.ones(recorded.shape[:2], dtype=torch.bool)
    wanted = _by_position(output, recorded.long())
    ours, wanted, same = (tensor[rows] for tensor in (_by_position(ours, positions), wanted, same))
    torch.testing.assert_close(ours[same], wanted[same], **case.tolerance("kv"))


def _by_position(rows: Tensor, positions: Tensor) -> Tensor:
    positions = positions.masked_fill(positions < 0, torch.iinfo(positions.dtype).max)  # absent rows come last
    return rows.gather(2, positions.argsort(dim=-1)[..., None].expand(-1, -1, -1, rows.shape[-1]))


# --- one layer, prefill and then token by token -----------------------------------------------------------------------


def _steps(case: Case, claim: Claim) -> None:
    inputs = case.inputs()
    keep, outputs = case.tensor("keep"), case.tensor("output")
    if inputs is None or keep is None or outputs is None:
        raise Unmapped("the recording of a sequence needs inputs, keep and output")
    query, key, value = inputs["q"], inputs["k"], inputs["v"]
    prefill = case.parameters["prefill_len"]
    recipe = recipe_for(case, claim, prefill)
    method = kvfoundry.Method.parse(recipe.spec)
    layer = _compress(recipe, query[:, :, :prefill], key[:, :, :prefill], value[:, :, :prefill])
    _compare_readable(method, layer, keep[0], f"{recipe.spec} after the prompt")
    for step in range(1, keep.shape[0]):
        at = slice(prefill + step - 1, prefill + step)
        output = layer.step(query[:, :, at], key[:, :, at], value[:, :, at])
        place = f"{recipe.spec} after step {step}"
        flat = output.transpose(1, 2).reshape(-1)
        torch.testing.assert_close(
            flat, outputs[step], **case.tolerance("output"), msg=lambda m, p=place: f"output {p}: {m}"
        )
        if prefill + step < key.shape[2]:
            _compare_readable(method, layer, keep[step], place)


def _compare_readable(method: Any, layer: Any, keep: Tensor, where: str) -> None:
    """keep: boolean [heads, tokens], what the coming token attends to, itself included."""
    coming = int(keep.nonzero()[:, 1].max())
    for head in range(keep.shape[0]):
        stored = layer.positions[0, head].tolist()
        skipped = -1 if method.unread_distance is None else coming - method.unread_distance
        readable = {position for position in stored if position >= 0 and position != skipped} | {coming}
        wanted = set(keep[head].nonzero().flatten().tolist())
        assert readable == wanted, (
            f"{where}, head {head}: readable only for us {sorted(readable - wanted)}, only recorded "
            f"{sorted(wanted - readable)}"
        )


# --- a tiny model, prefill and teacher-forced decoding ----------------------------------------------------------------


def _model(case: Case, claim: Claim) -> None:
    folder = case.folder.parent / "_models" / case.entry["model"]
    info = json.loads((folder / "model_info.json").read_text(encoding="utf-8"))
    tokens, batch = case.entry["seq_len"], case.entry["batch"]
    ids = load_file(folder / "baseline.safetensors")["input_ids"].long()[:batch]
    recipe = recipe_for(case, claim, tokens)
    method = kvfoundry.Method.parse(recipe.spec)
    recorded = _unmasked(case, tokens) or _recorded_layers(case, "indices")  # a masked entry is still stored
    if claim.inject:
        method = method.replace(score=GivenScores(tuple(_recorded_layers(case, "scores").values())))
    if claim.normals and case.tensor("randn0") is not None:
        numbers = tuple(case.tensor(f"randn{layer}") for layer in range(len(recorded)))
        assert method.score is not None
        method = method.replace(score=replace(method.score, draws=numbers))
    model = _load(folder)
    assert tokens == info["prefill_len"], f"the case has {tokens} tokens, its model was recorded with {info}"
    cache = kvfoundry.KVCache(model, method)
    with torch.no_grad():
        model(ids[:, :tokens], None, None, cache)
        for layer, indices in recorded.items():
            kept = cache.layers[layer]
            _compare_kept(
                kept.positions,
                kept.lengths,
                indices,
                tie_free=case.tensor(f"l{layer}.tie_free"),
                scores=case.tensor(f"l{layer}.{claim.scores}"),
                tolerance=case.tolerance("scores"),
                where=f"{recipe.spec} on {case.entry['model']}, layer {layer}",
            )
            for name in claim.merged:
                stored = case.tensor(f"l{layer}.{name}")
                assert stored is not None, f"the recording has no {name} of layer {layer}"
                ours = _by_position(getattr(kept, name), kept.positions)
                torch.testing.assert_close(ours, _by_position(stored, indices.long()), **case.tolerance("scores"))
        # A tie that we break another way gives other rows, and so other logits: then the scores above are the test.
        wanted = case.tensor("decode_logits")
        if wanted is None:
            raise Unmapped("the recording of a model case needs decode_logits")
        steps = [
            model(ids[:, at : at + 1], None, None, cache).logits[:, -1]
            for at in range(tokens, tokens + wanted.shape[1])
        ]
    if all(bool(free.all()) for free in _recorded_layers(case, "tie_free").values()):
        torch.testing.assert_close(torch.stack(steps, dim=1), wanted, **case.tolerance("logits"))


def _recorded_layers(case: Case, name: str) -> dict[int, Tensor]:
    """Layer index -> recorded tensor `l{i}.name`, in layer order; layers that the reference skips are absent."""
    layers = sorted(int(key[1:].split(".")[0]) for key in case.entry["tensors"] if key.endswith(f".{name}"))
    found = {layer: case.tensor(f"l{layer}.{name}") for layer in layers}
    return {layer: tensor for layer, tensor in found.items() if tensor is not None}


def _unmasked(case: Case, tokens: int) -> dict[int, Tensor]:
    """Layer index -> what is left where the recording names the entries (batch, head, position) that are masked."""
    kept = {}
    for layer, masked in _recorded_layers(case, "masked").items():
        _, heads, _ = case.tensor(f"l{layer}.inner_scores").shape  # type: ignore[union-attr]
        readable = torch.ones(case.entry["batch"], heads, tokens, dtype=torch.bool)
        readable[tuple(masked.long().T)] = False
        rows = readable.flatten(0, 1).nonzero()[:, 1]
        lengths = readable.flatten(0, 1).sum(dim=-1)
        kept[layer] = _padded(rows, lengths, fill=-1)[0].unflatten(0, readable.shape[:2])
    return kept


# --- a tiny model, compressed while it decodes ------------------------------------------------------------------------


def _decoding(case: Case, claim: Claim) -> None:
    folder = case.folder.parent / "_models" / case.entry["model"]
    tokens, steps = case.entry["seq_len"], case.entry["decode_steps"]
    ids = load_file(folder / "baseline.safetensors")["input_ids"].long()[: case.entry["batch"]]
    recipe = recipe_for(case, claim, tokens)
    model = _load(folder)
    cache = kvfoundry.KVCache(model, recipe.spec)
    numbers: dict[int, int] = {}  # events of a layer so far
    logits = []
    with torch.no_grad():
        model(ids[:, :tokens], None, None, cache)
        for layer, kept in enumerate(cache.layers):
            recorded = case.tensor(f"prefill.l{layer}.positions")
            if recorded is not None:
                _compare_kept(kept.positions, kept.lengths, recorded, where=f"{recipe.spec}, prompt, layer {layer}")
        for step in range(steps):
            logits.append(model(ids[:, tokens + step : tokens + step + 1], None, None, cache).logits[:, -1])
            for event in (event for event in case.entry["events"] if event["step"] == step):
                layer = event["layer"]
                number = numbers[layer] = numbers.get(layer, -1) + 1
                recorded = case.tensor(f"e{number}.l{layer}.positions")
                assert recorded is not None, f"event {number} of layer {layer} has no positions"
                kept = cache.layers[layer]
                where = f"{recipe.spec}, step {step}, layer {layer}"
                _compare_kept(kept.positions, kept.lengths, recorded, where=where)
    lengths = [int(layer.lengths.max()) for layer in cache.layers]
    assert lengths == case.entry["final_cache_len"], f"{recipe.spec}: {lengths}"
    wanted = case.tensor("decode_logits")
    assert wanted is not None
    torch.testing.assert_close(torch.stack(logits, dim=1), wanted, **case.tolerance("logits"))


_MODELS: dict[Path, PreTrainedModel] = {}


def _load(folder: Path) -> PreTrainedModel:
    if folder not in _MODELS:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        _MODELS[folder] = model.eval()
    return _MODELS[folder]
