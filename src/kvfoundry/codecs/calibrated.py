"""What `kvfoundry calibrate` writes for kvquant, and its file: thresholds and levels of every layer of one model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvfoundry.codecs.nuq import Levels
from kvfoundry.errors import DataError, SpecError

if TYPE_CHECKING:
    from kvfoundry.selection.budgets import ModelShape

_FORMAT = "kvfoundry-kvquant-1"


@dataclass(frozen=True)
class LayerTables:
    """What is calibrated for one layer: thresholds of raw keys [heads, head_dim], levels of keys and of values."""

    lower: Tensor
    upper: Tensor
    keys: Levels
    values: Levels


@dataclass(frozen=True)
class CalibratedLayer:
    """One layer at every bit width that was fitted: bits -> (levels of keys, levels of values)."""

    lower: Tensor
    upper: Tensor
    levels: dict[int, tuple[Levels, Levels]]

    def at(self, bits: int) -> LayerTables:
        return LayerTables(self.lower, self.upper, *self.levels[bits])


@dataclass(frozen=True, eq=False)
class Calibration:
    """Tables of all full-attention layers, in order.

    model: the identity of the model they were measured on (`kvfoundry.calibration.identity_of`). about: how.
    source: the file they came from.
    """

    model: dict[str, Any]
    outliers: float
    q_norm: bool
    layers: tuple[CalibratedLayer, ...]
    about: dict[str, Any] = field(default_factory=dict)
    source: str = "given"

    def check(self, shape: ModelShape) -> None:
        """SpecError when the tables were measured on another model than this one."""
        identity = shape.identity()
        for name, measured in self.model.items():
            if measured != identity.get(name):
                raise SpecError(
                    f"the calibration {self.source!r} was measured on another model ({name} {measured!r}, here "
                    f"{identity.get(name)!r}); measure one for {shape.family} with `kvfoundry calibrate`."
                )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; DataError when it cannot be written."""
        tensors: dict[str, Tensor] = {}
        for number, layer in enumerate(self.layers):
            tensors |= {f"{number}.lower": layer.lower, f"{number}.upper": layer.upper}
            for bits, pair in layer.levels.items():
                for name, levels in zip(("keys", "values"), pair, strict=True):
                    tensors[f"{number}.{name}.{bits}.code"] = levels.code
                    tensors[f"{number}.{name}.{bits}.value"] = levels.value
        head = {"model": self.model, "outliers": self.outliers, "q_norm": self.q_norm, "about": self.about}
        metadata = {"format": _FORMAT, "head": json.dumps(head)}
        try:
            save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path, metadata)
        except (OSError, SafetensorError) as error:
            raise DataError(f"cannot write the calibration {str(path)!r}: {error}.") from error

    @classmethod
    def read(cls, path: str | Path) -> Calibration:
        """SpecError for a file that is absent, damaged, or not such a file."""
        path = Path(path).expanduser()
        if not path.is_file():
            raise SpecError(f"there is no calibration file {str(path)!r}; make one with `kvfoundry calibrate`.")
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                names: list[str] = list(file.keys())
                tensors = {name: file.get_tensor(name) for name in names}
            if metadata.get("format") != _FORMAT:
                raise KeyError("format")
            head = json.loads(metadata["head"])
            layers = _layers(tensors)
            return cls(head["model"], head["outliers"], head["q_norm"], layers, head["about"], str(path))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise SpecError(f"{str(path)!r} is not a calibration file of kvquant, or it is damaged.") from error


def _layers(tensors: dict[str, Tensor]) -> tuple[CalibratedLayer, ...]:
    count = sum(name.endswith(".lower") for name in tensors)
    layers = []
    for number in range(count):
        bits = sorted({int(name.split(".")[2]) for name in tensors if name.startswith(f"{number}.keys.")})
        levels = {
            width: tuple(
                Levels(*(tensors[f"{number}.{name}.{width}.{part}"] for part in ("code", "value")))
                for name in ("keys", "values")
            )
            for width in bits
        }
        layers.append(CalibratedLayer(tensors[f"{number}.lower"], tensors[f"{number}.upper"], levels))  # type: ignore[arg-type]
    return tuple(layers)
