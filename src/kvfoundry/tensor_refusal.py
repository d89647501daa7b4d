"""A model that handles the returned key itself, instead of passing it on to attention, is told so by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvfoundry.errors import UnsupportedModelError

# What a model would touch if it handled the returned key itself instead of passing it on.
_TENSOR_NAMES = {
    *("shape", "size", "dim", "dtype", "to", "float", "half", "bfloat16", "contiguous", "view", "reshape", "flatten"),
    *("transpose", "permute", "mT", "T", "expand", "unsqueeze", "squeeze", "chunk", "split", "unflatten"),
    *("repeat", "repeat_interleave", "matmul", "mean", "sum"),
}


class RefusesTensorUse:
    """Mixin of a cache layer: whatever would treat it as a tensor raises UnsupportedModelError."""

    family: str

    def _refuse_as_tensor(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.family}: it works on the keys that the cache returns ({what}) before attention, "
            "which kvfoundry cannot intercept exactly; use a transformers cache for this model."
        )

    def __getattr__(self, name: str) -> Any:
        if name in _TENSOR_NAMES:
            raise self._refuse_as_tensor(f".{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, index: Any) -> Any:
        raise self._refuse_as_tensor("indexing")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        layer = next(value for value in _flat(args, kwargs) if isinstance(value, cls))
        raise layer._refuse_as_tensor(getattr(function, "__name__", str(function)))


def _flat(args: Any, kwargs: Any) -> Iterator[Any]:
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value
