"""Whose KV is it? Everything that decides what a passage leaves in a model, written down without ambiguity.

Two entries are the same only when the model (every weight, adapters, effective settings), the tokenizer, the method,
the tokens and the namespace are. What does not decide (device, path of the checkpoint, attention kernel, day, process)
is left out, so that a store is found again after a restart or on another machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvfoundry.calibration import identity_of
from kvfoundry.errors import DataError, StoreError
from kvfoundry.fingerprint import fingerprint, weights_of
from kvfoundry.method import Method
from kvfoundry.rope_layout import fresh_copy, rotary_module

if TYPE_CHECKING:
    from kvfoundry.chunks.chunk import ChunkKV

FORMAT = "kvfoundry-identity-1"

# Settings of a configuration that change no key and no value.
_IDLE_SETTINGS = {
    "_name_or_path", "_model_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype",
    "use_cache", "return_dict", "output_hidden_states", "output_attentions", "id2label", "label2id", "problem_type",
    "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "_attn_implementation",
    "attention_dropout", "pretraining_tp",
}  # fmt: skip

# Of a module that PEFT has adapted.
_ADAPTER_STATE = ("active_adapters", "merged_adapters", "scaling", "disable_adapters")


def digest(data: bytes) -> str:
    """The name under which something is stored: 64 hex characters. Equal names are never trusted without a look."""
    return hashlib.sha256(data).hexdigest()


def encoded(parts: Mapping[str, str | bytes]) -> bytes:
    """Names and values one after the other, each behind its length: no two mappings give the same bytes."""
    out = bytearray()
    for name, value in sorted(parts.items()):
        for piece in (name.encode(), value.encode() if isinstance(value, str) else value):
            out += len(piece).to_bytes(8, "little") + piece
    return bytes(out)


@dataclass(frozen=True)
class Identity:
    """What all chunks of one model, tokenizer, method and namespace have in common: name -> text, nothing else."""

    parts: Mapping[str, str]

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: Any = None,
        method: str | Method | None = None,
        *,
        namespace: str = "",
        revision: str | None = None,
        adapter: str | None = None,
    ) -> Identity:
        """The identity of a model as it is now. Reads every weight once (0.4 s for 135 million in float32 on a CPU).

        tokenizer: that the token ids come from. namespace: entries of one are never served to another. revision: of
        the checkpoint; by default the commit that transformers noted for a hub model. adapter: a name for adapters
        that do not show themselves; those of PEFT are found, with what is active, merged and how it is scaled. Make a
        new identity after weights or adapters have changed. Raises StoreError when weights are not in memory.
        """
        if any(tensor.device.type == "meta" for _, tensor in weights_of(model)):
            raise StoreError(
                "weights of the model are not in memory (meta device), so its chunks cannot be told apart."
            )
        recipe = Method.parse("fullkv" if method is None else method)
        commit = getattr(model.config, "_commit_hash", None)
        parts = {
            "format": FORMAT,
            "namespace": _namespace(namespace),
            "model": _canonical({name: value for name, value in identity_of(model).items() if name != "weights"}),
            "weights": fingerprint(weights_of(model)),
            "settings": digest(_canonical(_settings(model)).encode()),
            "rope": _rope(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "revision": revision if revision is not None else commit or "",
            "adapter": _canonical({"name": adapter or "", "found": _adapters(model)}),
            "tokenizer": "" if tokenizer is None else tokenizer_digest(tokenizer),
            "method": str(recipe),
            "recipe": digest(_canonical(_described(recipe)).encode()),
        }
        return cls(parts)

    def key(self, token_ids: Tensor | Sequence[int], *, context_ids: Tensor | Sequence[int] = ()) -> ChunkKey:
        """The key of a passage. context_ids: what stood in front of it when it was read; see `ChunkKV`."""
        passage, context = (torch.as_tensor(ids, dtype=torch.long).flatten().cpu() for ids in (token_ids, context_ids))
        if not len(passage):
            raise DataError("a passage without tokens has no key.")
        return ChunkKey(self, passage, context)

    def key_of(self, chunk: ChunkKV) -> ChunkKey:
        """The key under which a chunk belongs; DataError when it was made under another method or dtype."""
        key = self.key(chunk.token_ids, context_ids=chunk.context_ids)
        key.check(chunk)
        return key


@dataclass(frozen=True, eq=False)
class ChunkKey:
    """Identity and token ids of one passage. `id` is only a name for both."""

    identity: Identity
    token_ids: Tensor
    context_ids: Tensor

    @cached_property
    def id(self) -> str:
        """64 hex characters; names of files and keys of stores are made of it and of nothing else."""
        ids = {"tokens": _bytes(self.token_ids), "context": _bytes(self.context_ids)}
        return digest(encoded({"identity": encoded(self.identity.parts), **ids}))

    @property
    def namespace(self) -> str:
        """Whose entry it is."""
        return self.identity.parts["namespace"]

    def matches(self, parts: Mapping[str, str], chunk: ChunkKV) -> bool:
        """Whether a stored chunk is this one: every part of the identity and every token id."""
        return dict(parts) == dict(self.identity.parts) and self._holds(chunk) and self._made_so(chunk)

    def _holds(self, chunk: ChunkKV) -> bool:
        return (
            torch.equal(chunk.token_ids, self.token_ids)
            and torch.equal(chunk.context_ids, self.context_ids)
            and chunk.start == len(self.context_ids)
        )

    def _made_so(self, chunk: ChunkKV) -> bool:
        made = chunk.method, str(chunk.dtype).removeprefix("torch.")
        return made == (self.identity.parts["method"], self.identity.parts["dtype"])

    def check(self, chunk: ChunkKV) -> None:
        """DataError unless the chunk is what this key names."""
        parts = self.identity.parts
        if not self._holds(chunk):
            raise DataError("the chunk holds other tokens than its key names, or at another place.")
        if not self._made_so(chunk):
            raise DataError(
                f"the chunk was read under {chunk.method} in {chunk.dtype}, and its key names {parts['method']} in "
                f"{parts['dtype']}."
            )


def tokenizer_digest(tokenizer: Any) -> str:
    """Vocabulary, merges and every rule of a tokenizer; padding and truncation change with use and are left out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
        return digest(_canonical(rules | {"special": sorted(tokenizer.all_special_tokens)}).encode())
    text = backend.to_str()
    return digest(text[max(0, text.find('"added_tokens"')) :].encode())


def _namespace(name: Any) -> str:
    if not isinstance(name, str) or len(name) > 256 or not name.isprintable():
        raise StoreError(f"a namespace is printable text of at most 256 characters, got {name!r:.80}.")
    return name


def _settings(model: PreTrainedModel) -> dict[str, Any]:
    config = model.config.get_text_config(decoder=True).to_dict()
    return {name: value for name, value in config.items() if name not in _IDLE_SETTINGS}


def _rope(model: PreTrainedModel) -> str:
    """The rotation in force: frequencies and scale of the rotary module, before any call."""
    rotary = rotary_module(model)
    if rotary is None:
        return ""
    fresh = fresh_copy(rotary)
    scales = {name: f"{value:.6g}" for name, value in vars(fresh).items() if name.endswith("attention_scaling")}
    frequencies = fingerprint(sorted(fresh.named_buffers()), dtype=torch.bfloat16)
    return _canonical({"frequencies": frequencies, "scales": scales})


def _adapters(model: nn.Module) -> list[Any]:
    """Of every adapted module: which adapters are active, merged or off, and their scales (PEFT's names for these)."""
    found = []
    for name, module in model.named_modules():
        if hasattr(module, "merged_adapters"):
            state = {what: getattr(module, what, None) for what in _ADAPTER_STATE}
            found.append([name, _described(state)])
    return found


def _described(value: Any) -> Any:
    """A recipe or a setting as JSON: dataclasses by name and fields, tensors by their bits, whatever they hold."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return fingerprint([("", value.detach())])
    if isinstance(value, Mapping):
        return {str(name): _described(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_described(item) for item in value]
        return sorted(items, key=_canonical) if isinstance(value, (set, frozenset)) else items
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if is_dataclass(value) and not isinstance(value, type):
        # A calibration's file name says nothing of what it holds.
        held = {f.name: _described(getattr(value, f.name)) for f in fields(value) if f.name not in ("source", "calls")}
        return [name, held]
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return [name, _described(vars(value)) if hasattr(value, "__dict__") else str(value)]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _bytes(ids: Tensor) -> bytes:
    return ids.numpy().astype("<i8").tobytes()
