"""A picture of scores over length and depth: one heat map per method, all on one scale."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfoundry.errors import MissingExtraError
from kvfoundry.evaluate.results import Line
from kvfoundry.evaluate.summary import grid, group_by

FORMATS = ("png", "svg")


def require_matplotlib() -> None:
    """Refuse early what would stop when all is done.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("a picture needs matplotlib; get it with: pip install 'kvfoundry[plot]'") from error


def draw_heat_maps(lines: Sequence[Line], path: Path) -> Path | None:
    """Write the picture, its format named by the suffix of `path`; None where no line has a length and a depth.

    Columns are lengths, rows depths; a cell is the mean score of its items, in [0, 1].

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require_matplotlib()
    maps = {str(method): scores for (method,), group in group_by(lines, "method").items() if (scores := grid(group))}
    if not maps:
        return None
    # Not pyplot: a figure of its own needs no display and leaves nothing behind.
    from matplotlib.figure import Figure

    columns = min(len(maps), 3)
    rows = -(-len(maps) // columns)
    most_lengths = max(len({length for _, length in scores}) for scores in maps.values())
    most_depths = max(len({depth for depth, _ in scores}) for scores in maps.values())
    width, height = max(2.6, 0.34 * most_lengths + 1.4), max(1.8, 0.24 * most_depths + 1.2)
    figure = Figure(figsize=(width * columns + 0.8, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    image: Any = None
    for axis, (method, scores) in zip(axes.flat, maps.items(), strict=False):
        image = _heat_map(axis, method, scores)
    for axis in list(axes.flat)[len(maps) :]:
        axis.set_axis_off()
    figure.colorbar(image, ax=axes, label="score")
    figure.savefig(path, dpi=150)
    return path


def _heat_map(axis: Any, title: str, scores: dict[tuple[float, int], float]) -> Any:
    depths, lengths = sorted({depth for depth, _ in scores}), sorted({length for _, length in scores})
    nothing = float("nan")
    values = [[scores.get((depth, length), nothing) for length in lengths] for depth in depths]
    image = axis.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axis.set_title(title, fontsize=8, wrap=True)
    axis.set_xticks(range(len(lengths)), [str(length) for length in lengths], rotation=90, fontsize=7)
    axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=7)
    axis.set_xlabel("prompt length (tokens)", fontsize=8)
    axis.set_ylabel("depth (%)", fontsize=8)
    return image
