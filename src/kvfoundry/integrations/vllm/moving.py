"""Keys of a document moved to where it stands now, with the rotation of the model that vLLM serves.

How the model rotates is asked of one layer of its transformers twin, built from the configuration with weights drawn at
random. That vLLM holds keys in the same way is not believed but looked at: in the first layer a key depends on nothing
but its token and its position, so tokens that occur twice in a document must have keys that a move links.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from kvfoundry.blend.ropes import fixed_frequencies
from kvfoundry.chunks import ChunkKV
from kvfoundry.errors import KVFoundryError, UnsupportedModelError
from kvfoundry.rope import Rope

# Sizes of the twin that have nothing to do with the rotation.
_SMALL = {"num_hidden_layers": 1, "vocab_size": 16, "intermediate_size": 16}
# Pairs of equal tokens that are looked at.
_PAIRS = 16


class Mover:
    """rope: of every layer. bound: how far a moved key may lie from the real one, relative to the largest number."""

    def __init__(self, rope: Rope, bound: float):
        self._rope, self._bound = rope, bound
        self._checked = False

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> Mover:
        """The mover of a configuration; UnsupportedModelError for one whose layers differ or cannot be asked."""
        from transformers import AutoModelForCausalLM

        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"} or not all(getattr(config, "no_rope_layers", None) or [1]):
            raise UnsupportedModelError("its layers rotate keys differently.")
        small = copy.deepcopy(config)
        for name, size in _SMALL.items():
            setattr(small, name, size)
        if getattr(small, "layer_types", None):
            small.layer_types = small.layer_types[:1]
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(small, name, None)
        try:
            twin = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
            if not fixed_frequencies(twin):
                raise UnsupportedModelError("its RoPE frequencies depend on the length of the text.")
            rope = Rope.of(twin, 0)
        except KVFoundryError:
            raise
        except Exception as error:  # a configuration that transformers cannot build as such
            raise UnsupportedModelError(f"its rotation cannot be asked ({type(error).__name__}: {error}).") from error
        return cls(rope, 1e-3 if dtype == torch.float32 else 5e-2)

    def moved(self, keys: Tensor, behind: int, start: int) -> Tensor:
        """Keys [heads, tokens, dim] that were read from position `behind` on, as if read from `start` on."""
        where = torch.arange(keys.shape[1], device=keys.device)[None, None]
        return self._rope.move(keys[None], where + behind, where + start)[0]

    def check(self, chunk: ChunkKV, keys: Tensor) -> None:
        """Compare keys [heads, tokens, dim] of the first layer with moved ones; UnsupportedModelError when they differ.

        Looks once per model. A document without a token that occurs twice cannot be looked at, and is not moved then.
        """
        if self._checked:
            return
        seen: dict[int, int] = {}
        pairs: list[tuple[int, int]] = []
        for place, token in enumerate(chunk.token_ids.tolist()):
            if token in seen and len(pairs) < _PAIRS:
                pairs.append((seen[token], place))
            seen.setdefault(token, place)
        if not pairs:
            raise UnsupportedModelError("no token of the document occurs twice, so moved keys cannot be checked on it.")
        one, other = (torch.tensor(side, device=keys.device) for side in zip(*pairs, strict=True))
        found = self._rope.move(keys[None, :, one], one[None, None] + chunk.start, other[None, None] + chunk.start)[0]
        wanted = keys[:, other]
        coded = chunk.layers[0].record.form != "whole"
        bound = max(self._bound, 0.2 if coded else 0.0) * float(wanted.abs().max())
        if float((found.float() - wanted.float()).abs().max()) > bound:
            raise UnsupportedModelError("moved keys are not those that the model has at other positions.")
        self._checked = True
