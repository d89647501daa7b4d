"""Reused documents repaired before vLLM gets them: chosen tokens are computed again, by a copy of the model.

vLLM computes nothing in front of a token that it has been given (docs/vllm.md says why), so it cannot repair rows. What
a connector puts into blocks is its own business, though: with `repair=blend(...)` a worker holds the checkpoint once
more, as a transformers model, and blends a request's documents with it, as `kvfoundry.blend` does, while vLLM computes
other requests. Whether the copy is the model that vLLM serves is not believed but looked at: the rows of the first
chunk that is blended, which are exact, must be those that the copy computes.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfoundry.blend import Blend
from kvfoundry.blend.blended import blend_unchecked, ready_cache
from kvfoundry.blend.check import require_exact, require_fitting
from kvfoundry.chunks import ChunkKV
from kvfoundry.chunks.passage import read_passage
from kvfoundry.errors import KVFoundryError, UnsupportedModelError
from kvfoundry.integrations.vllm.packing import Rows
from kvfoundry.quiet import quiet

# How far rows of the copy may lie from vLLM's, relative to the largest number: other kernels, other sums; and codes.
_BOUND, _BOUND_HALF, _BOUND_CODED = 1e-3, 0.1, 0.3
# Tokens of the first chunk that are compared.
_COMPARED = 64


@dataclass(frozen=True, eq=False)
class Repaired:
    """rows: of every layer, of all tokens of the documents, in their places. recomputed: how many tokens were."""

    rows: list[Rows]
    recomputed: int


class Repairer:
    """model: the copy; blend: which tokens are computed again."""

    def __init__(self, model: PreTrainedModel, blend: Blend):
        self.model, self.blend = model, blend
        self._shape = require_exact(model)
        ready_cache(model, blend, None)
        self._checked = False
        self._turn = threading.Lock()  # one blend at a time: more would only share the same cores

    @classmethod
    def of(cls, folder: Path, config: Any, dtype: torch.dtype, device: torch.device, blend: Blend) -> Repairer:
        """Of a checkpoint. config: as vLLM serves it, with its overrides. UnsupportedModelError where it cannot be."""
        from transformers import AutoModelForCausalLM

        try:
            with quiet():
                model = AutoModelForCausalLM.from_pretrained(
                    str(folder), config=copy.deepcopy(config), dtype=dtype, local_files_only=True
                )
            return cls(torch.nn.Module.to(model, device).eval(), blend)
        except KVFoundryError:
            raise
        except Exception as error:  # whatever transformers cannot read, or a device that is full
            raise UnsupportedModelError(
                f"a second copy of its weights cannot be loaded ({type(error).__name__}: {error})."
            ) from error

    @torch.inference_mode()
    def repaired(self, chunks: Sequence[ChunkKV], following: Sequence[int]) -> Repaired:
        """Chunks one behind the other from position 0 on, blended. following: token ids of what comes next.

        Raises UnsupportedModelError when the copy computes other rows than vLLM, DataError as `blend_chunks`.
        """
        with self._turn:
            for chunk in chunks:
                require_fitting(self.model, self._shape, chunk)
            self._check(chunks[0])
            blended = blend_unchecked(self.model, [list(chunks)], [list(following)], self.blend)
        ids = torch.cat([chunk.token_ids for chunk in chunks])
        whole = ChunkKV.from_cache(blended.cache, ids)
        return Repaired([(layer.keys, layer.values) for layer in whole.layers], blended.recomputed_tokens[0])

    def _check(self, chunk: ChunkKV) -> None:
        """Once: the first chunk stands where it was read, behind nothing, so its rows are the model's own."""
        if self._checked or chunk.start:
            return
        own = read_passage(self.model, chunk.token_ids[:_COMPARED])
        coded = any(layer.record.form != "whole" for layer in chunk.layers)
        exact = torch.finfo(chunk.dtype).eps < 1e-5
        bound = _BOUND_CODED if coded else _BOUND if exact else _BOUND_HALF
        for number, (found, wanted) in enumerate(zip(chunk.plain(self.model).layers, own.layers, strict=True)):
            for one, other in ((found.keys, wanted.keys), (found.values, wanted.values)):
                if _apart(one[:, : other.shape[1]], other) > bound:
                    raise UnsupportedModelError(f"the copy of the model has other rows than vLLM in layer {number}.")
        self._checked = True


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).abs().max()) / max(1e-6, float(wanted.abs().max()))
