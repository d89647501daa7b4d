"""What every analysis leaves: a JSON file and a picture of the same name in one folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvfoundry.errors import DataError
from kvfoundry.evaluate.picture import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that the colour-blind can tell apart (Okabe and Ito), in the order of use.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#7f7f7f", "#000000")


def prepared(folder: Path, *, plot: bool = True) -> Path:
    """The folder, made where it is not there, before anything is computed.

    plot: whether a picture will be drawn. Raises DataError where the folder cannot be, and MissingExtraError without
    matplotlib for the picture.
    """
    if plot:
        require_matplotlib()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the folder {str(folder)!r} cannot be made ({error.strerror}); name another with --out."
        ) from error
    return folder


def new_figure(width: float, height: float, title: str) -> Figure:
    """A figure of its own, which needs no display. Sizes in inches."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure


def saved(folder: Path, name: str, data: dict[str, Any], figure: Figure) -> list[Path]:
    """Write <name>.json and <name>.png; their paths."""
    paths = [folder / f"{name}.json", folder / f"{name}.png"]
    try:
        paths[0].write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        figure.savefig(paths[1], dpi=130)
    except OSError as error:
        raise DataError(f"{error.filename or folder} cannot be written ({error.strerror}).") from error
    return paths


def numbers(tensor: Tensor, digits: int = 5) -> Any:
    """A tensor as nested lists of rounded numbers."""
    return _rounded(tensor.tolist(), digits)


def _rounded(value: Any, digits: int) -> Any:
    return [_rounded(each, digits) for each in value] if isinstance(value, list) else round(value, digits)


def padded_mean(rows: Sequence[Tensor]) -> Tensor:
    """The mean of tensors [steps, ...] of unequal length, step by step over those that have it."""
    steps = range(max(len(row) for row in rows))
    means = [torch.stack([row[step] for row in rows if len(row) > step]).mean(dim=0) for step in steps]
    return torch.stack(means) if means else rows[0]


def short(text: str, length: int = 26) -> str:
    """The text, cut where it is too long for a label, with line breaks shown."""
    text = text.replace("\n", "↵")
    return text if len(text) <= length else text[: length - 1] + "…"


def heat_map(axis: Any, values: Tensor, *, rows: Sequence[str], columns: Sequence[str], **look: Any) -> Any:
    """A map of [rows, columns] with a label on every row and on as many columns as there is room for."""
    image = axis.imshow(values.numpy(), aspect="auto", interpolation="nearest", **look)
    step = -(-len(columns) // 40)
    axis.set_xticks(range(0, len(columns), step), list(columns)[::step], rotation=90, fontsize=7)
    every = -(-len(rows) // 40)
    axis.set_yticks(range(0, len(rows), every), list(rows)[::every], fontsize=7)
    return image
