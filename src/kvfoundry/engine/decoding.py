"""The loop around the engine: transformers reads the prompt and chooses the first token, the engine goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from kvfoundry.cache import KVCache
from kvfoundry.devices import current
from kvfoundry.engine.engine import DecodeEngine
from kvfoundry.engine.program import Program
from kvfoundry.engine.sampling import Sampler
from kvfoundry.engine.serving import late_refusal

# Steps that the device may be ahead of the host, which looks at tokens when they arrive.
AHEAD = 3
# What a model may be given in every call and the engine knows how to leave out.
_USUAL = {"cache", "past_key_values", "attention_mask", "use_cache", "logits_to_keep", "position_ids"}

Refused = Callable[[str], None]


class _First(StoppingCriteria):
    """Asks the real criteria once, and ends the plain loop after the first token."""

    def __init__(self, criteria: StoppingCriteriaList):
        self.criteria = criteria
        self.done: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.done = self.criteria(input_ids, scores, **kwargs)
        return torch.ones(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class _Ended(StoppingCriteria):
    """Rows that ended before."""

    def __init__(self, done: Tensor):
        self.done = done

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return self.done


class _Open:
    """A streamer that does not learn of the end of the first token's loop."""

    def __init__(self, streamer: Any):
        self.put = streamer.put

    def end(self) -> None:
        """Not yet."""


def decoder(
    engine: DecodeEngine, cache: KVCache, streamer: Any, *, outlives: bool, refused: Refused, note: Refused
) -> Callable[..., Tensor]:
    """A decoding method for `model.generate(custom_generate=...)`.

    outlives: the cache is wanted afterwards. refused: told why, when the plain loop does it after all; note: told what
    else a reader of results must know. The streamer comes here, since transformers gives none to such a method.
    """

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        def plain(text: Tensor, criteria: StoppingCriteriaList, streamer: Any) -> Any:
            return model._sample(  # type: ignore[operator]
                text,
                logits_processor=logits_processor,
                stopping_criteria=criteria,
                generation_config=generation_config,
                streamer=streamer,
                **model_kwargs,
            )

        reason = _refusal(logits_processor, stopping_criteria, generation_config, model_kwargs)
        if reason is not None:
            refused(reason)
            return plain(input_ids, stopping_criteria, streamer)
        first = _First(stopping_criteria)
        text = plain(input_ids, StoppingCriteriaList([first]), None if streamer is None else _Open(streamer))
        assert isinstance(text, Tensor) and first.done is not None
        longest = stopping_criteria.max_length
        assert longest is not None
        new = longest - text.shape[1]
        ended = new <= 0 or bool(first.done.all())
        reason = None if ended else late_refusal(cache)
        if reason is not None:
            refused(reason)
            _lengthen(model_kwargs)
            begun = text.shape[1]
            text = plain(text, StoppingCriteriaList([*stopping_criteria, _Ended(first.done)]), streamer)
            if generation_config._pad_token_tensor is not None:
                text[first.done, begun:] = generation_config._pad_token_tensor
            return text
        if not ended:
            pad = generation_config._pad_token_tensor
            with current(text.device):
                program = engine.begin(
                    cache,
                    text,
                    new,
                    processors=logits_processor,
                    sample=generation_config.do_sample,
                    stops=generation_config._eos_token_tensor,
                    pad=0 if pad is None else int(pad),
                )
                ahead = 1 if outlives and any(layer.rows.spends for layer in program.cache.static) else AHEAD
                with getattr(model, "_optimize_model_for_decode", nullcontext)():
                    text = _run(program, text, first.done, new, stopping_criteria, streamer, ahead, pad)
                engine.finish(cache, text.shape[1] - 1 - cache.seen_tokens, keep=outlives)
            if program.note is not None:
                note(program.note)
        if streamer is not None:
            streamer.end()
        return text

    return decode


def _refusal(
    processors: LogitsProcessorList, criteria: StoppingCriteriaList, config: GenerationConfig, inputs: dict[str, Any]
) -> str | None:
    if config.return_dict_in_generate:
        return "scores or states of every step are asked for"
    if criteria.max_length is None:
        return "the answer has no longest length"
    others = sorted(name for name, value in inputs.items() if name not in _USUAL and value is not None)
    if others:
        return f"the model is given further inputs ({', '.join(others)})"
    positions = inputs.get("position_ids")
    if positions is not None and positions.dim() != 2:
        return "positions have several parts"
    return Sampler.refusal(processors)


def _lengthen(inputs: dict[str, Any]) -> None:
    """Mask and positions for the text with its first new token."""
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is not None:
        inputs["attention_mask"] = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
    if positions is not None:
        inputs["position_ids"] = torch.cat([positions, positions[:, -1:] + 1], dim=1)


def _run(
    program: Program,
    text: Tensor,
    done: Tensor,
    new: int,
    criteria: StoppingCriteriaList,
    streamer: Any,
    ahead: int,
    pad: Tensor | None,
) -> Tensor:
    """The text [batch, tokens] with what the program adds, until every row has ended or `new` tokens are there.

    done: [batch], rows that ended with the first token. The host looks at a token while the device computes the next
    ones; what it has computed beyond the end is left out.
    """
    batch, length = text.shape
    host = torch.empty(batch, length + new, dtype=text.dtype)
    host[:, :length] = text
    done, filler = done.cpu(), None if pad is None else int(pad)
    arrivals, launched, device = _Arrivals(text, ahead), 0, text.device
    while True:
        while launched < new and arrivals.waiting < ahead:
            program.advance()
            arrivals.send(program.ids)
            launched += 1
        token = arrivals.next()
        if filler is not None:
            token = torch.where(done, filler, token)
        host[:, length] = token
        length += 1
        if streamer is not None:
            streamer.put(token)
        done = done | criteria(host[:, :length], None).cpu()
        if bool(done.all()):
            return host[:, :length].to(device)


class _Arrivals:
    """Tokens on their way to the host, in order."""

    def __init__(self, text: Tensor, ahead: int):
        self._cuda = text.device.type == "cuda"
        self._free = [torch.empty(text.shape[0], 1, dtype=text.dtype, pin_memory=self._cuda) for _ in range(ahead + 1)]
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    @property
    def waiting(self) -> int:
        """Tokens that are sent and not taken yet."""
        return len(self._sent)

    def send(self, ids: Tensor) -> None:
        """Copy the newest tokens [batch, 1] to the host, behind what the device has been given to do."""
        place = self._free.pop()
        place.copy_(ids, non_blocking=True)
        event = None
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
        self._sent.append((place, event))

    def next(self) -> Tensor:
        """The oldest of them: [batch]."""
        place, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
        token = place[:, 0].clone()
        self._free.append(place)
        return token
