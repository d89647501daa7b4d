"""How much every head of a model retrieves: head tables in the published form, for any model.

After Retrieval Head (arXiv 2404.15574) and HeadKV (arXiv 2410.19258): a needle is hidden in a long text, the answer is
read out token by token, and each head is scored by how much it looks at the needle while doing so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfoundry import compat
from kvfoundry.analysis.observed import observed_cache
from kvfoundry.analysis.probes import Probe, Variant, make_probes
from kvfoundry.attention import attach, family_of
from kvfoundry.checks import choice, whole
from kvfoundry.devices import input_device
from kvfoundry.errors import DataError, SpecError

Measure = Literal["top", "mass", "copy"]
Answers = Literal["forced", "generated"]


@dataclass(frozen=True)
class HeadScores:
    """scores: model layer -> one score per query head, means over the probes; about: how they were measured."""

    scores: dict[int, tuple[float, ...]]
    about: dict[str, Any]

    @property
    def table(self) -> tuple[tuple[float, ...], ...]:
        """The scores as the `table` parameter of headkv takes them."""
        return tuple(self.scores[layer] for layer in sorted(self.scores))

    def best(self, count: int) -> list[tuple[int, int, float]]:
        """The `count` heads with the highest scores: (layer, head, score)."""
        heads = [(layer, head, score) for layer, row in self.scores.items() for head, score in enumerate(row)]
        return sorted(heads, key=lambda entry: -entry[2])[:count]

    def save(self, path: str | Path) -> Path:
        """Write {"layer-head": score} to `path` and how it was measured beside it; returns the second path.

        heads.json is described by heads.meta.json. Raises DataError when the folder cannot be written.
        """
        path = Path(path)
        beside = path.with_name(f"{path.stem}.meta.json")
        table = {f"{layer}-{head}": score for layer, row in self.scores.items() for head, score in enumerate(row)}
        try:
            path.write_text(json.dumps(table, indent=0) + "\n", encoding="utf-8")
            beside.write_text(json.dumps(self.about, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise DataError(f"cannot write the head table {str(path)!r}: {error.strerror}.") from error
        return beside


def measure_heads(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    variant: Variant = "retrieval",
    measure: Measure = "top",
    answers: Answers = "forced",
    tokens: int = 1024,
    probes: int = 12,
    seed: int = 0,
    on_probe: Callable[[int], None] | None = None,
) -> HeadScores:
    """Score every query head of the full-attention layers of a decoder.

    Each probe is a text of `tokens` tokens with a needle of n rows that count (see `make_probes` for the variants).
    While its answer of T tokens is read out, one decode step per token, a head with weights a_t scores

        "top"   1/T sum_t sum of a_t over needle rows that are among its n largest (HeadKV)
        "mass"  1/T sum_t sum of a_t over needle rows
        "copy"  1/T sum_t [the largest a_t is on a needle row that holds the very token being written] (Retrieval Head)

    answers: "forced" feeds the right answer, which measures any model; "generated" lets the model answer greedily and
    counts the probes of which it writes at least half of the tokens right, as the papers do.
    on_probe: called with the number of probes done. The model keeps its own attention, weights and hooks.
    Raises SpecError for a bad parameter; DataError when the probes do not fit the model, or none was answered.
    """
    choice("variant", variant, ("retrieval", "reasoning"))
    choice("measure", measure, ("top", "mass", "copy"))
    choice("answers", answers, ("forced", "generated"))
    for name, value in (("tokens", tokens), ("probes", probes)):
        whole(name, value, least=1)
    whole("seed", seed)
    config = model.config.get_text_config(decoder=True)
    if not any(kind == "full_attention" for kind, _ in compat.layer_types(config)):
        raise SpecError(f"{family_of(model)} has no full-attention layer, so there is nothing to measure.")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise DataError(f"tokens={tokens} is more than the {limit} positions of {family_of(model)}.")
    made = make_probes(tokenizer, variant, tokens=tokens, count=probes, seed=seed)
    counted, right = [], []
    with attach(model):
        for done, probe in enumerate(made, start=1):
            scores, hits = _run(model, probe, measure, forced=answers == "forced")
            right.append(hits / len(probe.answer))
            if answers == "forced" or right[-1] >= 0.5:
                counted.append(scores)
            if on_probe is not None:
                on_probe(done)
    if not counted:
        raise DataError(f"the model answered none of {probes} probes; use answers='forced' or fewer tokens.")
    means = {layer: torch.stack([scores[layer] for scores in counted]).mean(dim=0) for layer in counted[0]}
    about = {
        "model": getattr(model.config, "_name_or_path", "") or type(model).__name__,
        "model_type": model.config.model_type,
        "variant": variant,
        "measure": measure,
        "answers": answers,
        "tokens": tokens,
        "probes": probes,
        "counted": len(counted),
        "answer_tokens_right": round(sum(right) / len(right), 4),
        "seed": seed,
        "layers": sorted(means),
        "heads": len(next(iter(means.values()))),
    }
    return HeadScores({layer: tuple(round(score, 8) for score in row.tolist()) for layer, row in means.items()}, about)


@torch.inference_mode()
def _run(model: PreTrainedModel, probe: Probe, measure: Measure, *, forced: bool) -> tuple[dict[int, Tensor], int]:
    """Layer -> [query_heads] scores of one probe on the CPU, and how many answer tokens the model has right."""
    device = input_device(model)
    prompt = torch.tensor([probe.prompt], device=device)
    rows = torch.tensor(probe.rows, device=device)
    seen: dict[int, Tensor] = {}  # weights of the step in progress
    cache = observed_cache(model, seen.__setitem__)
    cache.expect_prompt(prompt.shape[1])
    # The last token of the prompt writes the first token of the answer, so it is a step of its own.
    model(prompt[:, :-1], None, None, cache, use_cache=True, logits_to_keep=1)
    seen.clear()
    totals: dict[int, Tensor] = {}
    token, right = prompt[:, -1:], 0
    for wanted in probe.answer:
        logits = model(token, None, None, cache, use_cache=True).logits[0, -1]
        own = int(logits.argmax())
        written = wanted if forced else own
        right += int(own == wanted)
        holds = prompt[0, rows] == written
        for layer, weights in seen.items():
            found = _score(weights, rows, holds, measure).to(weights.device)
            totals[layer] = found if layer not in totals else totals[layer] + found
        seen.clear()
        token = torch.tensor([[written]], device=device)
    return {layer: (total / len(probe.answer)).cpu() for layer, total in totals.items()}, right


def _score(weights: Tensor, rows: Tensor, holds: Tensor, measure: Measure) -> Tensor:
    """[query_heads] of one step. weights: [query_heads, rows]; rows: of the needle; holds: which hold the token."""
    # Layers of one model may live on several devices.
    rows, holds = rows.to(weights.device), holds.to(weights.device)
    on_needle = weights[:, rows]
    if measure == "mass":
        return on_needle.sum(dim=1)
    if measure == "copy":
        return ((weights.argmax(dim=1)[:, None] == rows) & holds).any(dim=1).float()
    threshold = weights.topk(min(len(rows), weights.shape[1]), dim=1).values[:, -1:]
    return on_needle.masked_fill(on_needle < threshold, 0.0).sum(dim=1)
