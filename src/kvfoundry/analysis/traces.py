"""Where a model looks while it answers: the attention of every decode step, summed over the passages of its prompt.

Weights are those of the model's own queries over the keys that the cache holds, seen by the layers of a full cache
(`observed`), head by head; sums are taken at once, so that nothing of the size of a prompt is kept per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from kvfoundry.analysis.observed import observed_cache
from kvfoundry.analysis.prompts import PassagePrompt, check_any, passage_prompt, samples_of
from kvfoundry.attention import attach, family_of
from kvfoundry.compat import layer_types
from kvfoundry.devices import input_device
from kvfoundry.errors import DataError
from kvfoundry.feeding import position_limit
from kvfoundry.generation import stop_tokens


@dataclass(frozen=True, eq=False)
class Trace:
    """One answer, step by step.

    written, tokens: id and text of the token that each step wrote. layers: numbers of the full-attention layers. mass:
    [steps, layers, parts + 1] share of the attention on every part of the prompt and, last, on the answer so far; mean
    over the query heads; sums to 1 but for attention sinks of the model. to_previous, to_first: [steps - 1, layers]
    cosine between the attention over the tokens of the passages in a step and in the one before it, or in the first
    one; mean over heads.
    """

    prompt: PassagePrompt
    written: tuple[int, ...]
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    mass: Tensor
    to_previous: Tensor
    to_first: Tensor

    @property
    def chunk_shares(self) -> Tensor:
        """[steps, layers, chunks]: what of the attention to all passages goes to each chunk of them."""
        held = self.mass[:, :, self.prompt.chunks]
        return held / held.sum(dim=-1, keepdim=True).clamp(min=1e-12)


@torch.inference_mode()
def trace(model: PreTrainedModel, tokenizer: Any, prompt: PassagePrompt, steps: int) -> Trace:
    """Answer greedily for at most `steps` tokens, and note where each of them looked.

    Raises DataError for a prompt that is too long, and for a model without full-attention layers.
    """
    kinds = [kind for kind, _ in layer_types(model.config.get_text_config(decoder=True))]
    if "full_attention" not in kinds:
        raise DataError(f"{family_of(model)} has no full-attention layer, so there is nothing to observe.")
    limit = position_limit(model)
    if limit is not None and len(prompt.ids) + steps > limit:
        raise DataError(f"sample {prompt.item} has {len(prompt.ids)} tokens, too many for {limit} positions.")
    device = input_device(model)
    seen: dict[int, Tensor] = {}  # weights of the step in progress
    stops = stop_tokens(model)
    ends = {stops} if isinstance(stops, int) else set(stops or ())
    with attach(model):
        cache = observed_cache(model, seen.__setitem__)
        ids = torch.tensor([prompt.ids], device=device)
        cache.expect_prompt(ids.shape[1])
        # The last token of the prompt writes the first token of the answer, so it is a step of its own.
        model(ids[:, :-1], None, None, cache, use_cache=True, logits_to_keep=1)
        seen.clear()
        token, written = ids[:, -1:], []
        masses: list[Tensor] = []
        looks: list[list[Tensor]] = []
        for _ in range(steps):
            logits = model(token, None, None, cache, use_cache=True).logits[0, -1]
            weights = [seen[layer] for layer in sorted(seen)]
            masses.append(torch.stack([_mass(each, prompt).cpu() for each in weights]))
            looks.append([_over_passages(each, prompt) for each in weights])
            layers = tuple(sorted(seen))
            seen.clear()
            token = logits.argmax().view(1, 1)
            written.append(int(token))
            if written[-1] in ends:
                break
    return Trace(
        prompt,
        tuple(written),
        tuple(tokenizer.decode([each]) for each in written),
        layers,
        torch.stack(masses),
        _likeness(looks[:-1], looks[1:]),
        _likeness(looks[:1] * (len(looks) - 1), looks[1:]),
    )


def _mass(weights: Tensor, prompt: PassagePrompt) -> Tensor:
    """[parts + 1] of weights [query_heads, rows]."""
    mean = weights.float().mean(dim=0)
    inside = [mean[part.start : part.stop].sum() for part in prompt.parts]
    return torch.stack([*inside, mean[len(prompt.ids) :].sum()])


def _over_passages(weights: Tensor, prompt: PassagePrompt) -> Tensor:
    chunks = [prompt.parts[number] for number in prompt.chunks]
    return weights[:, chunks[0].start : chunks[-1].stop].float().cpu()


def _likeness(left: Sequence[Sequence[Tensor]], right: Sequence[Sequence[Tensor]]) -> Tensor:
    """[steps, layers] of attention [query_heads, rows] per step and layer."""
    rows = [
        torch.stack([F.cosine_similarity(a, b, dim=-1).mean() for a, b in zip(*pair, strict=True)])
        for pair in zip(left, right, strict=True)
    ]
    return torch.stack(rows) if rows else torch.empty(0, len(right[0]) if right else 0)


def traces(
    model: PreTrainedModel,
    tokenizer: Any,
    data: Path | None = None,
    *,
    limit: int = 4,
    steps: int = 16,
    passages: int | None = None,
    chunk_tokens: int | None = None,
    skip_damaged: bool = False,
    on_skip: Callable[[str], None] | None = None,
    on_trace: Callable[[int, int], None] | None = None,
) -> list[Trace]:
    """A trace of each of the first `limit` samples; see `samples_of` and `passage_prompt`.

    on_skip: told of samples that are left out because they are too long. on_trace: told how many are done, of how many.
    Raises DataError when none is left.
    """
    samples = samples_of(data, limit=limit, passages=passages, skip_damaged=skip_damaged)
    prompts = [passage_prompt(tokenizer, sample, chunk_tokens) for sample in samples]
    room = position_limit(model)
    fitting = [prompt for prompt in prompts if room is None or len(prompt.ids) + steps <= room]
    for prompt in prompts:
        if prompt not in fitting and on_skip is not None:
            on_skip(f"sample {prompt.item} is left out: {len(prompt.ids)} tokens and {steps} steps in {room} positions")
    check_any(fitting, f"all are longer than the model's {room} positions; give --passages or another model")
    found = []
    for done, prompt in enumerate(fitting, start=1):
        found.append(trace(model, tokenizer, prompt, steps))
        if on_trace is not None:
            on_trace(done, len(fitting))
    return found
