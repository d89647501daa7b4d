"""The cache of one model under one method: a list of layers that plain transformers can use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvfoundry import compat
from kvfoundry.attention import attach, backend_of, family_of
from kvfoundry.calibration import identity_of
from kvfoundry.devices import input_device, layer_devices
from kvfoundry.errors import CacheStateError, UnsupportedModelError
from kvfoundry.kernels.attention import backend
from kvfoundry.layer import CacheLayer
from kvfoundry.layer_state import storage_bytes
from kvfoundry.layouts.pair_store import MiniCachePairStore
from kvfoundry.method import Method
from kvfoundry.pairing import LayerPair, far_apart
from kvfoundry.prompt import Prompt
from kvfoundry.rope import Rope
from kvfoundry.selection.budgets import ModelShape
from kvfoundry.visibility import WHOLE_PAST, WindowRule

# The rotary embedding of a layer of a model.
RopeOf = Callable[[PreTrainedModel, int], Rope]

# Layers that hold a recurrent state, or nothing, instead of rows: transformers' own classes serve them.
_STATE_LAYERS = ("linear_attention", "conv", "dummy", "mamba", "moe", "mlp")


class KVCache(Cache):
    """A transformers cache whose rows follow a method.

        cache = kvfoundry.KVCache(model, "snapkv(budget=256)")
        model.generate(**inputs, past_key_values=cache)

    model: any decoder whose family goes through transformers' attention interface; it is attached (see
    `kvfoundry.attach`). method: a spec string, a Method, or None for the full cache. Sliding-window layers keep their
    own rule and linear-attention layers their state; the method acts on the full-attention layers.
    Raises SpecError or UnsupportedModelError before anything is computed.
    """

    def __init__(self, model: PreTrainedModel, method: str | Method | None = None):
        self.method = Method.parse("fullkv" if method is None else method).fitted(_shape(model))
        attach(model)
        self.prompt = Prompt()
        super().__init__(layers=_layers(model, self.method, self.prompt, self._rope_of))
        self.pairs = _paired(self.layers, self.method, family_of(model))

    @staticmethod
    def _rope_of(model: PreTrainedModel, layer_idx: int) -> Rope:
        """The embedding of a layer, for methods that turn its keys."""
        return Rope.of(model, layer_idx)

    @cached_property
    def _first(self) -> CacheLayer:
        return self.attention_layers[0]

    @property
    def attention_layers(self) -> list[CacheLayer]:
        """The layers that hold rows."""
        return [layer for layer in self.layers if isinstance(layer, CacheLayer)]

    def devices(self, model: PreTrainedModel) -> list[torch.device]:
        """Where each of `attention_layers` computes, and so where its rows belong; several for a split model."""
        places, default = layer_devices(model), input_device(model)
        numbers = [number for number, layer in enumerate(self.layers) if isinstance(layer, CacheLayer)]
        return [places.get(number, default) for number in numbers]

    def expect_prompt(self, tokens: int) -> None:
        """Announce a prompt of `tokens` columns that arrives in several calls: methods treat all of them as prompt.

        Without an announcement the first call is the whole prompt and everything after it is decode. After
        `recall(act_again=True)` another prompt begins, and the same holds for it.
        """
        if self.seen_tokens and self.prompt.ended(self.seen_tokens):
            raise CacheStateError("expect_prompt comes before the prompt has ended; reset() the cache for a new one.")
        self.prompt.expect(tokens, self.seen_tokens)

    @property
    def awaits_prompt(self) -> bool:
        """Whether the next call opens a prompt: the cache is empty, or the method acts again since a recall."""
        return self.prompt.tokens is None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Called by the model. Refuses to go on from a forward pass that was interrupted halfway."""
        if self.layers[layer_idx] is self._first:
            self._refuse_half_a_pass()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _refuse_half_a_pass(self) -> None:
        first, rest = self._first, self.attention_layers
        if any(layer.seen != first.seen or layer.is_interrupted for layer in rest):
            raise CacheStateError(
                "an earlier forward pass was interrupted, or the model skips some of its attention layers; "
                "call reset() on this cache before using it again."
            )

    def recall(self, *, act_again: bool = False) -> None:
        """Bring every row that the method parked back to the device, in its place, bit for bit (see `park`).

        The cache then holds every row ever stored, each as it was computed, in the memory of a full cache. What that
        equals depends on when rows were computed:

        - Nothing has been fed since rows were first dropped (after a document in one call, or in pieces under
          schedule(prefill='end')): the cache is the one that never dropped a row, and everything that follows is the
          same, logits and text.
        - Rows that were computed after an eviction (a later piece of a prompt, an answer) saw fewer rows then, and
          that does not change: from now on they are read along with all others, as they are. To ask one document
          many things, each with nothing but all of it in sight, fork() the document's cache and recall the fork.

        act_again: without it the method rests, in prompt and in decode, and drops nothing more: the cache is a full
        one from here on (until `reset`). With it what is fed next counts as a prompt, as in an empty cache (the next
        call, or as many columns as `expect_prompt` then announces): the method reads it with all rows in sight,
        chooses anew by its queries, parks the rest, and goes on by its schedule. A share of a budget is then one of
        everything seen. It can be called again at any time, also to end the rest.

        Raises SpecError for a method that does not park, and for act_again where the method chooses rows by repeating
        the whole context (kvzip); CacheStateError after an interrupted forward pass.
        """
        self._refuse_half_a_pass()
        for layer in self.attention_layers:
            layer.recall(act_again=act_again)

    @property
    def nbytes(self) -> int:
        """Bytes of all storages behind the rows, positions and statistics of every layer.

        What a method keeps in host memory is apart (`host_nbytes`); the device buffers that it streams through count.
        """
        return storage_bytes(tensor for layer in self.attention_layers for tensor in layer.tensors()) + (
            self.prompt.rings.nbytes
        )

    @property
    def host_nbytes(self) -> int:
        """Bytes of all host storages behind rows: those that are streamed from there (`headinfer`), and parked ones."""
        return storage_bytes(tensor for layer in self.attention_layers for tensor in layer.host_tensors())

    @property
    def parked_nbytes(self) -> int:
        """Bytes of all host storages behind parked rows."""
        return storage_bytes(tensor for layer in self.attention_layers for tensor in layer.parked_tensors())

    @property
    def peak_nbytes(self) -> int:
        """Largest size so far, prompt included: layers prefill one after the other, each shrinks before the next."""
        return max(self.prompt.peak_nbytes, self.nbytes)

    @property
    def seen_tokens(self) -> int:
        """Columns seen, padding included: the position of the next token of an unpadded row."""
        return self._first.seen

    @property
    def kept_rows(self) -> float:
        """Mean rows per KV head over batch and full-attention layers."""
        counts = [layer.lengths.float().mean() for layer in self._full_layers() if layer.rows is not None]
        return float(torch.stack(counts).mean()) if counts else 0.0

    @property
    def kept_share(self) -> float:
        """Rows kept over real tokens seen, over batch and full-attention layers."""
        shares = [
            (layer.lengths.float() / layer.real.clamp(min=1)[:, None]).mean()
            for layer in self._full_layers()
            if layer.real is not None
        ]
        return float(torch.stack(shares).mean()) if shares else 1.0

    @property
    def prefill_share(self) -> float | None:
        """Attention of the prompt that was computed, as a share of what dense attention computes, in blocks over all
        full-attention layers and heads; None where no method said what to leave out."""
        return self.prompt.work.share

    @property
    def notes(self) -> list[str]:
        """What a reader of results must know: methods that did not act, and why."""
        lost = self.prompt.losses.sentence(self.method)
        return [*([] if lost is None else [lost]), *self._prefill_notes(), *self._parking_notes(), *self._idle_notes()]

    def _prefill_notes(self) -> list[str]:
        if self.method.prefill is None or not self.seen_tokens:
            return []
        share = self.prefill_share
        if share is None:
            what = (
                "read no prompt: it came from chunks" if self._full_layers() else "acts on no layer: all have windows"
            )
            return [f"{self.method} {what}."]
        if share == 1:
            return [f"{self.method} left nothing out: its patterns cover a prompt of this length."]
        return [f"{self.method} computed {share:.1%} of the prompt's attention."]

    def _parking_notes(self) -> list[str]:
        if any(layer.rests for layer in self.attention_layers):
            return [f"{self.method} rests since recall(): every row is on the device, and none is dropped."]
        if self.method.placement is not None and self.seen_tokens and self._full_layers():
            return [f"{self.method}: rows are in host memory (host_nbytes) and stream through the device."]
        if self.parked_nbytes:
            return [f"{self.method}: dropped rows are still in host memory (parked_nbytes); recall() brings them back."]
        return []

    def _idle_notes(self) -> list[str]:
        acts = self.method.evicts or self.method.codec is not None or self.method.placement is not None
        if acts and not self._full_layers():
            return [f"{self.method} acts on no layer: all attention layers of this model have a window of their own."]
        if self.method.pairs is not None:
            if not self.pairs:
                return [f"{self.method} acts on no layer: this model has no pair of layers there."]
            return far_apart(self.method, self.pairs[0].store)
        if self.method.evicts and not any(layer.evicts for layer in self.attention_layers):
            return [f"{self.method} acts on no layer: it skips all {len(self._full_layers())} full-attention layers."]
        everything = not self.method.evicts and self.method.codec is None and self.method.placement is None
        if self.method.read is not None and everything:
            return [
                f"{self.method} drops nothing: it reads fewer rows in decode, and memory is that of the full cache."
            ]
        layers = [layer for layer in self.attention_layers if layer.evicts and layer.real is not None]
        if not layers or self.awaits_prompt or any(layer.rows_lost_at or layer.rests for layer in layers):
            return []
        longest = min(self.seen_tokens, self.prompt.tokens or 0)
        schedule = self.method.schedule
        if schedule.prefill == "never" and schedule.every is None and self.method.reconstructs is None:
            return [f"{self.method} dropped nothing: its schedule never acts."]
        return [f"{self.method} dropped nothing: a prompt of {longest} tokens is within its budget."]

    def _full_layers(self) -> list[CacheLayer]:
        return [layer for layer in self.attention_layers if layer.rule.span is None]

    def fork(self) -> KVCache:
        """An independent cache over the same memory: one document, many questions. Copies only what is written."""
        if len(self.attention_layers) != sum(not dummy for dummy in self._is_stateless()):
            raise CacheStateError("fork() is not available for models with recurrent-state layers; use copy.deepcopy.")
        twin = object.__new__(KVCache)
        twin.method, twin.prompt = self.method, self.prompt.forked()
        layers = [layer.fork(twin.prompt) if isinstance(layer, CacheLayer) else layer for layer in self.layers]
        Cache.__init__(twin, layers=layers)
        store = self.pairs[0].store.fork() if self.pairs else None
        twin.pairs = [] if store is None else [pair.fork(store, layers) for pair in self.pairs]
        return twin

    def _is_stateless(self) -> list[bool]:
        return [type(layer).__name__ == "DummyLayer" for layer in self.layers]

    def activate_past_recording(self) -> None:
        """Called by transformers before assisted or prompt-lookup decoding, which takes rejected tokens back.

        Raises CacheStateError when the method drops rows.
        """
        if any(layer.acts for layer in self.attention_layers):
            raise CacheStateError(
                f"assisted and prompt-lookup decoding take tokens back (crop), and {self.method} drops rows that this "
                "needs; use fullkv, or decode without an assistant."
            )
        super().activate_past_recording()

    def reset(self) -> None:
        """Empty the cache; the memory is freed and the next call starts a new prompt."""
        super().reset()
        self.prompt.forget()


def _rope(model: PreTrainedModel, layer_idx: int, method: Method, rope_of: RopeOf) -> Rope | None:
    asks = method.slot_positions or (method.score is not None and method.score.needs_rope)
    if not asks and not (method.codec is not None and method.codec.needs_rope):
        return None
    rope = rope_of(model, layer_idx)
    if method.slot_positions and rope.depends_on_length:
        raise UnsupportedModelError(
            f"{family_of(model)}: its RoPE frequencies depend on the length of the text, so rows cannot stream through "
            "slot positions; use positions='original'."
        )
    return rope


def _paired(layers: list[Any], method: Method, family: str) -> list[LayerPair]:
    """The pairs of layers that the method merges; UnsupportedModelError where the layers of a pair differ in kind."""
    if method.pairs is None:
        return []
    store, found = MiniCachePairStore(method.pairs.t, method.pairs.retention), []
    for numbers in method.pairs.of(len(layers)):
        earlier, later = (layers[i] for i in numbers)
        kinds = {layer.rule if isinstance(layer, CacheLayer) else None for layer in (earlier, later)}
        if len(kinds) > 1:
            raise UnsupportedModelError(
                f"{family}: {method} merges neighbouring layers, but its layers {numbers[0]} and {numbers[1]} are of "
                "different kinds (full attention, window or state); minicache needs layers of one kind."
            )
        if kinds == {WHOLE_PAST}:
            found.append(LayerPair(store, numbers, earlier, later))
            found[-1].bind()
    return found


def _shape(model: PreTrainedModel) -> ModelShape:
    config = model.config.get_text_config(decoder=True)
    types = [kind for kind, _ in compat.layer_types(config)]
    full = tuple(i for i, kind in enumerate(types) if kind == "full_attention")
    query_heads = getattr(config, "num_attention_heads", 1)
    kv_heads = getattr(config, "num_key_value_heads", None) or query_heads
    return ModelShape(family_of(model), len(types), full, query_heads, kv_heads, partial(identity_of, model))


def _layers(model: PreTrainedModel, method: Method, prompt: Prompt, rope_of: RopeOf) -> list[Any]:
    family = family_of(model)
    kernel = backend(backend_of(model))
    types = compat.layer_types(model.config.get_text_config(decoder=True))
    full = [i for i, (kind, _) in enumerate(types) if kind == "full_attention"]
    layers: list[Any] = []
    for i, (kind, kwargs) in enumerate(types):
        if kind in _STATE_LAYERS:
            stock = compat.stock_layer(kind, kwargs)
            if stock is None:
                raise UnsupportedModelError(f"{family}: transformers has no cache layer for its {kind!r} layers.")
            layers.append(stock)
            continue
        if kind == "full_attention":
            rule = WHOLE_PAST
        elif kind == "sliding_attention":
            rule = WindowRule(sliding=kwargs["sliding_window"])
        elif kind == "chunked_attention":
            rule = WindowRule(chunked=kwargs["sliding_window"])
        else:
            raise UnsupportedModelError(f"{family}: layers of type {kind!r} are not served.")
        layers.append(
            CacheLayer(
                method,
                layer_idx=full.index(i) if i in full else i,
                num_layers=len(full),
                rule=rule,
                kernel=kernel,
                family=family,
                prompt=prompt,
                rope=_rope(model, i, method, rope_of) if i in full else None,
            )
        )
    if not any(isinstance(layer, CacheLayer) for layer in layers):
        raise UnsupportedModelError(f"{family}: it has no attention layers with keys and values.")
    return layers
