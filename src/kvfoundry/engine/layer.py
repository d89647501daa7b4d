"""One layer in the engine: static rows, and the step that stores a token and reads them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from kvfoundry.engine.attention import Extra, Kernels, Step
from kvfoundry.engine.rows import StaticRows
from kvfoundry.travelling import TravellingKey


class StaticLayer(CacheLayerMixin):
    """Rows that stay where they are, and what the method does with them in a step.

    position: [batch], shared by all layers: the index of the token that a step computes.
    began: [batch, heads] rows that were there at first, on the CPU.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_sliding = False

    def __init__(
        self,
        number: int,
        rows: StaticRows,
        extra: Extra,
        kernels: Kernels,
        position: Tensor,
        family: str,
    ):
        super().__init__()
        self.number, self.rows, self.extra = number, rows, extra
        self.kernels, self.position, self.family = kernels, position, family
        self.began = torch.zeros(rows.starts.shape, dtype=torch.long)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Send the new rows on as the key. [batch, heads, 1, dim] each."""
        new = NewRows(self, key_states, value_states)
        return new, new

    def get_seq_length(self) -> int:
        """Not known on the host while a graph runs: positions are given."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No mask is made: every stored row is seen."""
        return query_length, 0

    def get_max_length(self) -> int:
        """No maximum that a model should know of."""
        return -1

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Store the row of one token per sequence, read all rows, let the method choose what goes next."""
        step = Step(query, key, value, self.position, scaling, softcap, sinks)
        return self.kernels.step(step, self.rows, self.extra)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that holds memory."""
        yield from self.rows.tensors()
        for part in self.extra:
            if part is not None:
                yield from part.tensors()


class NewRows(TravellingKey):
    """The key and value of one token per sequence on their way to attention."""

    def __init__(self, layer: StaticLayer, key: Tensor, value: Tensor):
        self.layer, self.key, self.value = layer, key, value

    @property
    def family(self) -> str:  # type: ignore[override]
        """Name of the model's family."""
        return self.layer.family

    def attend(
        self,
        query: Tensor,
        mask: Any,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        module: nn.Module | None = None,
    ) -> Tensor:
        """One step of the layer; every stored row is seen, so the mask is not looked at."""
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if torch.compiler.is_compiling():
            return _opaque_step(query, self.key, self.value, self.layer.number, scaling, softcap, sinks)
        return self.layer.step(query, self.key, self.value, scaling, softcap, sinks)


class StaticCache(Cache):
    """The layers of one model, as its forward pass takes them."""

    def __init__(self, layers: Sequence[StaticLayer]):
        super().__init__(layers=list(layers))
        self.static = list(layers)
        hosted = [layer.extra.hosted for layer in layers if layer.extra.hosted is not None]
        self.ring = hosted[0].ring if hosted else None
        self._hosted = hosted
        self._streamed = [each.rows for each in hosted if each.streams]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Called by the model."""
        return self.static[layer_idx].update(key_states, value_states)

    def after_step(self) -> None:
        """What is due between two steps."""
        for layer in self.static:
            if layer.extra.coded is not None:
                layer.extra.coded.after_step()

    @property
    def host_nbytes(self) -> int:
        """Bytes of the rows on the host."""
        return sum(each.rows.hosted_nbytes for each in self._hosted)

    def repeated(self) -> None:
        """A step was made by a graph."""
        if self.ring is not None:
            self.ring.repeated()

    def __enter__(self) -> StaticCache:
        _entered.append(self)
        if self.ring is not None:
            self.ring.begin(self._streamed)
        return self

    def __exit__(self, *exception: object) -> None:
        _entered.pop()
        if self.ring is not None:
            self.ring.end()


# The caches whose forward passes are under way. A compiled model names a layer by its number, so that the same code
# serves the layers of every generation.
_entered: list[StaticCache] = []


@torch.library.custom_op("kvfoundry::static_step", mutates_args=())
def _opaque_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    return _entered[-1].static[layer].step(query, key, value, scaling, softcap, sinks)


@_opaque_step.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])
