"""Who decodes an answer: the engine where it can and may, else the plain loop of transformers, and why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from kvfoundry.cache import KVCache
from kvfoundry.engine.attention import without_triton
from kvfoundry.engine.decoding import decoder
from kvfoundry.engine.engine import DecodeEngine
from kvfoundry.engine.serving import refusal
from kvfoundry.errors import KVFoundryError


class Decoding(NamedTuple):
    """The decoding method of one batch, None for transformers' own, and what a reader of results must know of it."""

    method: Callable[..., Tensor] | None
    notes: list[str]


class Choice:
    """How the answers of one call are decoded, batch after batch.

    engine: an engine to use, True for a new one, False for none, None for one where `require_kernels` or `compile` asks
    for it, and where the device has its kernels. require_kernels: KVFoundryError instead of another way. compile: as in
    `DecodeEngine`.
    """

    def __init__(
        self, model: PreTrainedModel, engine: DecodeEngine | bool | None, *, require_kernels: bool, compile: bool
    ):
        self.model, self.required, self.compile = model, require_kernels, compile
        if engine is False and (require_kernels or compile):
            raise KVFoundryError("engine=False decodes by the plain loop; leave require_kernels and compile out.")
        if isinstance(engine, DecodeEngine) and engine.model is not model:
            raise KVFoundryError("the engine was made for another model.")
        self._asked, self._never = bool(engine) or require_kernels or compile, engine is False
        self._engine = engine if isinstance(engine, DecodeEngine) else None
        self._own = self._engine is None

    def decoding(
        self,
        device: torch.device,
        cache: KVCache,
        streamer: Any,
        config: GenerationConfig | None,
        options: dict[str, Any],
        *,
        outlives: bool,
    ) -> Decoding:
        """The decoding method for `model.generate`; notes may come while it runs.

        config, options: what `generate` is given. outlives: the cache is wanted afterwards.
        """
        plain = Decoding(None, [])
        if not self._asked and (self._never or without_triton(device) is not None):
            return plain
        if self.required and (missing := without_triton(device)) is not None:
            raise KVFoundryError(f"require_kernels=True, but {missing}.")
        reason = (
            _mode_refusal(self.model, config, options)
            or (None if device.type in ("cpu", "cuda") else f"the engine does not know the device {device.type}")
            or ("rows in codes are wanted afterwards" if outlives and cache.method.codec is not None else None)
            or refusal(self.model, cache)
        )
        if reason is not None:
            self._refused(plain.notes, reason)
            return plain
        if self._engine is None:
            self._engine = DecodeEngine(self.model, compile=self.compile)
        notes: list[str] = []
        refused = partial(self._refused, notes)
        method = decoder(self._engine, cache, streamer, outlives=outlives, refused=refused, note=notes.append)
        return Decoding(method, notes)

    def end(self) -> None:
        """Let go of buffers and graph, where they are not a caller's."""
        if self._engine is not None and self._own:
            self._engine.clear()

    def _refused(self, notes: list[str], reason: str) -> None:
        if self.required:
            raise KVFoundryError(f"require_kernels=True, but the engine cannot serve this: {reason}.")
        if self._asked:
            notes.append(f"decoded by the plain loop: {reason}.")


def _mode_refusal(model: PreTrainedModel, given: GenerationConfig | None, options: dict[str, Any]) -> str | None:
    """Why this way of decoding is not the engine's."""
    own = model.generation_config
    config = copy.deepcopy(given or own or GenerationConfig())
    config.update(**{name: value for name, value in options.items() if name != "stop_strings"})
    if given is not None and own is not None:
        for name in ("num_beams", "do_sample", "prompt_lookup_num_tokens", "penalty_alpha", "stop_strings"):
            if getattr(config, name, None) is None:
                setattr(config, name, getattr(own, name, None))
    if config.stop_strings:
        return "stop_strings stand in the generation config; give them to generate"
    mode = config.get_generation_mode(options.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"{mode.value.replace('_', ' ')} goes beyond one token per step and sequence"
    given_too = [name for name in ("custom_generate", "position_ids") if options.get(name) is not None]
    if given_too:
        return f"{given_too[0]} is given"
    return None
