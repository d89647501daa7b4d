"""What stands in for a cache layer while a prompt is blended: the one place where reused and fresh rows meet.

The model runs as it is, on the tokens of one pass. Its attention hands query and fresh rows to the layer, as in every
other call (see `kvfoundry.layer`), and the layer reads them together with the rows that are reused. So a pass over some
of the tokens is an ordinary forward call with fewer columns: no module is changed, no hook is set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kvfoundry.blend.placing import Feed
from kvfoundry.blend.rows import WorkingRows
from kvfoundry.errors import UnsupportedModelError
from kvfoundry.kernels.attention.span import Span
from kvfoundry.layer import CacheLayer
from kvfoundry.layouts.base import Reading, RowsView
from kvfoundry.method import Method
from kvfoundry.prompt_mask import PromptMask

# What looks on while question tokens read the reused rows: layer, query, positions, what they read, and how.
Listener = Callable[[int, Tensor, Tensor, RowsView, Reading], None]


class Reached(Exception):
    """The layer up to which a pass runs has been reached."""


@dataclass(eq=False)
class Pass:
    """One forward call over some tokens of the prompt.

    tokens: their indices per batch row, ascending, on the CPU. behind: they come after the context, read it and leave
    nothing; otherwise their rows replace the reused ones. whole: they are all tokens of the context. stop_at: the layer
    whose keys and values are wanted (`caught`); nothing is computed or replaced from there on. corner_from: the layer
    from which queries see by the lower right corner (see `Blend.mask`). final: the cache takes over what the layers
    hold.
    """

    tokens: list[Tensor]
    behind: bool = False
    whole: bool = False
    stop_at: int | None = None
    corner_from: int | None = None
    listener: Listener | None = None
    final: bool = False
    caught: tuple[Tensor, Tensor] | None = None
    _known: dict[torch.device, tuple[Tensor, list[Tensor]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._host = _rectangle(self.tokens)
        self._span = _span(self._host)

    @property
    def columns(self) -> int:
        return self._host.shape[1]

    def positions(self, device: torch.device) -> Tensor:
        """[batch, columns] on a device, -1 behind shorter rows. All layers there share it: a copy waits for the GPU."""
        return self._on(device)[0]

    def chosen(self, device: torch.device) -> list[Tensor]:
        """`tokens` on a device."""
        return self._on(device)[1]

    def _on(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        if device not in self._known:
            self._known[device] = self._host.to(device), [own.to(device) for own in self.tokens]
        return self._known[device]

    def sight(self, layer: int, lengths: Tensor, device: torch.device) -> tuple[Tensor, Span]:
        """Positions up to which every query sees in this layer, on its device, and their span over the batch."""
        if self.corner_from is None or layer < self.corner_from:
            return self.positions(device), self._span
        counts = torch.tensor([len(own) for own in self.tokens])
        corner = torch.arange(self.columns) + (lengths - counts)[:, None]
        corner = torch.where(self._host < 0, -1, corner)
        return corner.to(device), _span(corner)


def _rectangle(tokens: list[Tensor]) -> Tensor:
    """[batch, columns] on the CPU, -1 behind shorter rows."""
    width = max(len(own) for own in tokens)
    rectangle = torch.full((len(tokens), width), -1)
    for row, own in enumerate(tokens):
        rectangle[row, : len(own)] = own
    return rectangle


def _span(positions: Tensor) -> Span:
    """Lowest and highest position in each column, padding left out."""
    far = torch.iinfo(torch.long).max
    return Span(torch.where(positions < 0, far, positions).amin(dim=0), positions.amax(dim=0))


class BlendLayer(CacheLayer):
    """One attention layer of a blended prompt. number: among the attention layers; target: the layer of the cache."""

    def __init__(self, number: int, target: CacheLayer, feed: Feed):
        super().__init__(
            Method.parse("fullkv"), layer_idx=number, rule=target.rule, kernel=target.kernel, family=target.family
        )
        self.number, self.target, self.feed = number, target, feed
        self.running: Pass | None = None
        self._working: WorkingRows | None = None

    @property
    def working(self) -> WorkingRows:
        """The rows as they are now, made when they are first asked for."""
        if self._working is None:
            self._working = self.feed.rows(self.number)
        return self._working

    @property
    def is_reused(self) -> bool:
        """Whether the rows still are to be made from the chunks."""
        return self._working is None

    def attend(
        self,
        query: Tensor,
        mask: PromptMask,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        module: nn.Module | None = None,
    ) -> Tensor:
        """As `CacheLayer.attend`, for the running pass; columns behind its tokens only stand for the whole length."""
        step = self.running
        if step is None or self._pending is None:
            raise UnsupportedModelError(f"{self.family}: layer {self.number} shares its keys, so it cannot be blended.")
        (keys, values), self._pending = self._pending, None
        mask.check(self.rule, self.family)
        extra = query.shape[2] - step.columns
        query, keys, values = (tensor[:, :, : step.columns] for tensor in (query, keys, values))
        if self.number == step.stop_at:
            step.caught = keys, values
            raise Reached
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        reading = Reading(self.kernel, scale, softcap, sinks, self.rule)
        output = self._over(step, query, keys, values, reading)
        if step.final:
            self.hand_over(query, step.positions(query.device), reading, module)
        return torch.nn.functional.pad(output, (0, 0, 0, extra)) if extra else output

    def _over(self, step: Pass, query: Tensor, keys: Tensor, values: Tensor, reading: Reading) -> Tensor:
        device = query.device
        if step.behind:
            behind = step.positions(device)
            view = self.working.followed_by(keys, values, behind)
            if step.listener is not None:
                step.listener(self.number, query, behind, view, reading)
            visibility = reading.visibility(behind, view.positions, own=False, complete=False)
            return _attended(query, view.keys, view.values, visibility, reading)
        if step.whole:
            # Every row that may be seen is fresh: the reused ones are not even loaded.
            number, feed = self.number, self.feed
            whole = not feed.absent(number)
            self._working = WorkingRows.fresh(keys, values, feed.positions(number), feed.lengths, whole=whole)
            positions, _ = step.sight(self.number, self.feed.lengths, device)
            own = reading.visibility(positions, step.positions(device)[:, None], own=True, complete=False)
            return _attended(query, keys, values, own, reading)
        working = self.working
        working.write(step.chosen(device), keys, values)
        positions, span = step.sight(self.number, self.feed.lengths, device)
        output = working.attend(query, positions, span, reading)
        working.seal()
        return output

    def hand_over(
        self,
        query: Tensor | None = None,
        positions: Tensor | None = None,
        reading: Reading | None = None,
        module: nn.Module | None = None,
    ) -> None:
        """Give the rows to the cache's layer, with the queries of what was computed last, if anything was."""
        heads = self.feed.pieces[0][0].chunk.layers[self.number].heads
        rows, self._working = self.working.stored(), None
        self.target.hold(rows, int(self.feed.lengths.max()), heads, self.feed.lengths)
        if query is not None and positions is not None and reading is not None:
            self.target.look_back(query, positions, reading, module)


def _attended(query: Tensor, keys: Tensor, values: Tensor, visibility: object, reading: Reading) -> Tensor:
    return reading.kernel(
        query, keys, values, visibility, scaling=reading.scaling, softcap=reading.softcap, sinks=reading.sinks
    )
