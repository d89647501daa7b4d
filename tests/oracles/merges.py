"""Drivers for recordings of merges in decode: one step on given tensors, and a tiny model with its events."""

import json
from dataclasses import dataclass, replace

import torch
from safetensors.torch import load_file
from torch import Tensor

import kvfoundry
from kvfoundry.layer import CacheLayer
from kvfoundry.merging.cam import merge_probability, spread
from kvfoundry.selection.draws import Draws, GivenDraws
from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.scores import Score

from .cases import Case
from .mapping import Claim, Unmapped, drawn_around, recipe_for
from .replay import _load


def replay_step(case: Case, claim: Claim) -> None:
    """Values and attention of one decode step. The reference merges row n - recent + 1 of n and keeps it for now."""
    inputs = case.inputs()
    if inputs is None or "attn" not in inputs:
        raise Unmapped("the recording of one step needs values and attn")
    values, received = inputs["values"], inputs["attn"][:, :, -1]
    tokens = values.shape[2]
    method = kvfoundry.Method.parse(recipe_for(case, claim, tokens).spec)
    at = tokens - case.parameters["recent_budget"] + 1
    kept = torch.ones(values.shape[:3], dtype=torch.bool)
    kept[:, :, at] = False
    wanted, drawn, output = (case.tensor(name) for name in ("merge_prob", "merge_mask", "values_out"))
    assert wanted is not None and drawn is not None and output is not None
    probability = merge_probability(received, kept, ~kept, None)[:, :, at]
    torch.testing.assert_close(probability[0], wanted, **case.tolerance("values"))
    merges = ~kept & (drawn > 0)[None, :, None]
    ours = spread(values, kept, merges, method.dispose.merge, method.dispose.divisor == "count")
    torch.testing.assert_close(ours, output, **case.tolerance("values"))


@dataclass(frozen=True, eq=False)
class _RecordedScores(Score):
    """events[layer][seen tokens] is [1, heads, rows]: their mean over heads ranks for all, as in the reference."""

    events: dict[int, dict[int, Tensor]]

    def __call__(self, evidence: Evidence) -> Tensor:
        scores = self.events[evidence.layer_idx][int(evidence.seen[0])]
        return scores.mean(dim=1, keepdim=True).expand(-1, evidence.rows.keys.shape[1], -1)


@dataclass(frozen=True, eq=False)
class _RecordedDraws(Draws):
    """per_event[layer] is a list of GivenDraws, told apart by the newest position."""

    per_event: dict[int, dict[int, GivenDraws]]

    def __call__(self, layer_idx: int, positions: Tensor) -> Tensor:
        return self.per_event[layer_idx][int(positions.max())](0, positions)


def replay_events(case: Case, claim: Claim) -> None:
    folder = case.folder.parent / "_models" / case.entry["model"]
    info = json.loads((folder / "model_info.json").read_text(encoding="utf-8"))
    tokens, steps = case.entry["seq_len"], case.entry["decode_steps"]
    assert tokens == info["prefill_len"]
    ids = load_file(folder / "baseline.safetensors")["input_ids"].long()[: case.entry["batch"]]
    events = _events(case)
    scores: dict[int, dict[int, Tensor]] = {}
    draws: dict[int, dict[int, GivenDraws]] = {}
    for (number, layer), step in events.items():
        seen = tokens + step + 1
        found = case.tensor(f"e{number}.l{layer}.scores")
        assert found is not None
        scores.setdefault(layer, {})[seen] = found
        before = _positions_before(case, number, layer, seen)
        draws.setdefault(layer, {})[seen - 1] = _draws(case, number, layer, before, seen)
    method = kvfoundry.Method.parse(recipe_for(case, claim, tokens).spec)
    method = method.replace(score=_RecordedScores(scores), dispose=replace(method.dispose, draws=_RecordedDraws(draws)))
    cache = kvfoundry.KVCache(_load(folder), method)
    model, wanted = _load(folder), case.tensor("decode_logits")
    assert wanted is not None
    logits = []
    with torch.no_grad():
        model(ids[:, :tokens], None, None, cache)
        for step in range(steps):
            # Teacher-forced: the tokens of the baseline go on behind the prompt.
            logits.append(model(ids[:, tokens + step : tokens + step + 1], None, None, cache).logits[:, -1])
            for (number, layer), at in events.items():
                if at == step:
                    _compare_event(case, number, layer, cache.layers[layer])
    torch.testing.assert_close(torch.stack(logits, dim=1), wanted, **case.tolerance("logits"))


def _events(case: Case) -> dict[tuple[int, int], int]:
    """(event number, layer) -> decode step, counted from 0."""
    numbered: dict[int, int] = {}
    found = {}
    for event in case.entry["events"]:
        layer = event["layer"]
        found[numbered.get(layer, 0), layer] = event["step"]
        numbered[layer] = numbered.get(layer, 0) + 1
    return found


def _positions_before(case: Case, number: int, layer: int, seen: int) -> Tensor:
    """Token positions in the cache right before an event: what the last one kept, and everything since."""
    if number == 0:
        return torch.arange(seen)
    kept = case.tensor(f"e{number - 1}.l{layer}.positions")
    assert kept is not None
    kept = kept[0, 0].long().sort().values
    size = case.tensor(f"e{number}.l{layer}.scores").shape[-1]  # type: ignore[union-attr]
    return torch.cat([kept, torch.arange(seen - (size - kept.numel()), seen)])


def _draws(case: Case, number: int, layer: int, before: Tensor, seen: int) -> GivenDraws:
    """The recorded draws by token position; candidates are the dropped rows with the best mean scores, ascending."""
    probability, drawn = (case.tensor(f"e{number}.l{layer}.{name}") for name in ("merge_prob", "merge_mask"))
    kept, scores = (case.tensor(f"e{number}.l{layer}.{name}") for name in ("indices", "scores"))
    assert probability is not None and drawn is not None and kept is not None and scores is not None
    mean = scores[0].mean(dim=0)
    mean[kept[0, 0].long()] = -torch.inf
    candidates = mean.topk(probability.shape[2]).indices.sort().values
    uniform = torch.ones(1, probability.shape[1], seen)
    uniform[:, :, before[candidates]] = drawn_around(probability, drawn)
    return GivenDraws((uniform,))


def _compare_event(case: Case, number: int, layer: int, ours: CacheLayer) -> None:
    kept, values = (case.tensor(f"e{number}.l{layer}.{name}") for name in ("positions", "values_out"))
    assert kept is not None and values is not None
    assert torch.equal(ours.positions, kept.long()), f"kept rows of event {number}, layer {layer}"
    torch.testing.assert_close(ours.values, values, **case.tolerance("scores"))
