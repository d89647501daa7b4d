"""The next token on the device: transformers' logits processors, as far as they need no host, then the choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Processors that look at the scores alone.
_OF_SCORES = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "SuppressTokensLogitsProcessor",
}

Process = Callable[[Tensor, Tensor], Tensor]  # scores [batch, vocabulary] float32, tokens so far []


class Sampler:
    """Turns logits into tokens, in operations of fixed shape.

    stops: [stop tokens] on the device; pad: what stands behind a stop token. so_far: [] tokens of the text so far,
    padding included, on the device.
    """

    def __init__(
        self, processors: Sequence[Any], ids: Tensor, vocabulary: int, *, sample: bool, stops: Tensor | None, pad: int
    ):
        self.sample, self.pad = sample, pad
        # what makes two samplers alike, as far as a recorded step is concerned
        self.settings = (
            sample,
            pad,
            None if stops is None else tuple(stops.flatten().tolist()),
            *map(_told, processors),
        )
        device = ids.device
        self.stops = torch.empty(0, dtype=torch.long, device=device) if stops is None else stops.to(device).flatten()
        self.running = torch.ones(ids.shape[0], dtype=torch.bool, device=device)
        self.so_far = torch.tensor(ids.shape[1], device=device)
        self._used: list[_Repetition] = []
        self._steps = [self._made(processor, ids, vocabulary) for processor in processors]

    @staticmethod
    def refusal(processors: Sequence[Any]) -> str | None:
        """Why these processors cannot run on the device; None where they can."""
        for processor in processors:
            name = type(processor).__name__
            served = name in _OF_SCORES or name in _MADE
            if not served:
                return f"{name} looks at the text on the host"
        return None

    def _made(self, processor: Any, ids: Tensor, vocabulary: int) -> Process:
        make = _MADE.get(type(processor).__name__)
        if make is None:
            return lambda scores, so_far: processor(None, scores)
        made = make(processor, ids, vocabulary)
        if isinstance(made, _Repetition):
            self._used.append(made)
        return made

    def __call__(self, logits: Tensor) -> Tensor:
        """The next token of every sequence [batch], the pad token where it has ended; logits: [batch, vocabulary]."""
        scores = logits.to(torch.float32)
        for step in self._steps:
            scores = step(scores, self.so_far)
        if self.sample:
            weights = torch.softmax(scores, dim=-1)
            # the draw of torch.multinomial for one sample, without its look at the weights
            token = (weights / torch.empty_like(weights).exponential_(1)).argmax(dim=-1)
        else:
            token = scores.argmax(dim=-1)
        token = torch.where(self.running, token, self.pad)
        self.running &= ~(token[:, None] == self.stops).any(dim=1)
        self.so_far += 1
        for seen in self._used:
            seen.add(token)
        return token

    def restart(self, other: Sampler) -> None:
        """Begin anew with the text of another sampler of the same settings."""
        for own, given in zip(self._state(), other._state(), strict=True):
            own.copy_(given)

    def _state(self) -> list[Tensor]:
        return [self.running, self.so_far, *(seen.used for seen in self._used)]


def _told(processor: Any) -> tuple[Any, ...]:
    """A processor and everything that it was told, as plain values."""
    told = sorted((name, value) for name, value in vars(processor).items() if name != "prompt_ignore_length")
    plain = ((name, value.tolist() if isinstance(value, Tensor) else value) for name, value in told)
    return type(processor).__name__, *((name, str(value)) for name, value in plain)


class _Repetition:
    """transformers' repetition penalty, from a mark on every token that the text has."""

    def __init__(self, processor: Any, ids: Tensor, vocabulary: int):
        self.penalty = float(processor.penalty)
        # one column more, for ids that the model reads and cannot write
        self.used = torch.zeros(ids.shape[0], vocabulary + 1, dtype=torch.bool, device=ids.device)
        ids = ids.clamp(max=vocabulary)
        ignored = getattr(processor, "prompt_ignore_length", None)  # tokens of each row, or of all; unknown to 5.17
        if ignored is not None:
            number = torch.arange(ids.shape[1], device=ids.device)
            ids = ids.masked_fill(number < torch.as_tensor(ignored, device=ids.device).reshape(-1, 1), vocabulary)
        self.used.scatter_(1, ids, True)

    def add(self, token: Tensor) -> None:
        self.used.scatter_(1, token[:, None], True)

    def __call__(self, scores: Tensor, so_far: Tensor) -> Tensor:
        penalized = torch.where(scores < 0, scores * self.penalty, scores / self.penalty)
        return torch.where(self.used[:, :-1], penalized, scores)


class _NoStopBefore:
    """No stop token while the text has fewer than so many tokens."""

    def __init__(self, least: int, stops: Tensor, ids: Tensor, vocabulary: int):
        self.least = least
        self.mask = torch.zeros(vocabulary, dtype=torch.bool, device=ids.device)
        self.mask[stops.to(ids.device).flatten()] = True

    def __call__(self, scores: Tensor, so_far: Tensor) -> Tensor:
        return scores.masked_fill(self.mask & (so_far < self.least), -torch.inf)


def _min_new(processor: Any, ids: Tensor, vocabulary: int) -> _NoStopBefore:
    least = processor.prompt_length_to_skip + processor.min_new_tokens
    return _NoStopBefore(least, processor.eos_token_id, ids, vocabulary)


def _min_length(processor: Any, ids: Tensor, vocabulary: int) -> _NoStopBefore:
    return _NoStopBefore(processor.min_length, processor.eos_token_id, ids, vocabulary)


# Processors that look at the text so far, and the form of them that knows what it needs on the device.
_MADE: dict[str, Callable[[Any, Tensor, int], Any]] = {
    "RepetitionPenaltyLogitsProcessor": _Repetition,
    "MinNewTokensLengthLogitsProcessor": _min_new,
    "MinLengthLogitsProcessor": _min_length,
}
