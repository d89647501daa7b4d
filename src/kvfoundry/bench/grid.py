"""The whole benchmark: gates first, then every arm and method on every context and batch, until the time is up."""

from __future__ import annotations

import itertools
import math
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfoundry.bench.gate import check, in_float32
from kvfoundry.bench.latency import ARMS, OWN, NotServed, Run, Runner
from kvfoundry.bench.record import OutOfTime, Record
from kvfoundry.bench.roofline import Roofline, prompt_flops, row_bytes, weight_bytes
from kvfoundry.bench.transfer import copy_rate, disk_rates, link_rates, matmul_rate
from kvfoundry.cache import KVCache
from kvfoundry.devices import input_device
from kvfoundry.errors import DataError, KVFoundryError, SpecError, unknown_name
from kvfoundry.feeding import check_length
from kvfoundry.method import Method
from kvfoundry.planning.geometry import geometry

# Arms by what they cost to begin: those that compile come behind all others.
_QUICK = ("eager", "plain", "engine")
# Of which at least one step counts: the first and the last ones do not.
_LEAST_TOKENS = 5
_FULL = Method.parse("fullkv")


@dataclass(frozen=True)
class Grid:
    """What is measured: methods (each a recipe), arms (see `ARMS`), contexts in tokens or as given ids, and batches.

    texts: prompts as token ids, in place of contexts of random ids. new_tokens: of every answer; repeat: runs of each
    figure behind one that warms up. prefill_chunk, random_rows: see `Runner`.
    """

    methods: Sequence[Method]
    lengths: Sequence[int]
    batches: Sequence[int] = (1,)
    arms: Sequence[str] = ("eager", "static", "plain", "engine")
    texts: Sequence[Sequence[int]] = ()
    new_tokens: int = 33
    repeat: int = 3
    seed: int = 0
    prefill_chunk: int | None = None
    random_rows: bool = False

    def __post_init__(self) -> None:
        """Raises DataError for an unknown arm, and for numbers that cannot be."""
        for arm in self.arms:
            if arm not in ARMS:
                raise DataError(unknown_name("arm", arm, ARMS))
        numbers = {"--lengths": self.lengths, "--batch": self.batches, "--repeat": (self.repeat,)}
        for flag, values in numbers.items():
            for value in values:
                if value < 1:
                    raise DataError(f"{flag} {value} is too small; give 1 or more.")
        if self.new_tokens < _LEAST_TOKENS:
            raise DataError(f"--max-new-tokens {self.new_tokens} leaves no step to time; give {_LEAST_TOKENS} or more.")
        if self.random_rows and (self.texts or self.prefill_chunk is not None):
            raise DataError(
                "random rows stand for a prompt, so --file and --prefill-chunk have nothing to say; leave them."
            )
        if not self.lengths and not self.texts:
            raise DataError("there is no context to measure; give --lengths.")

    def refuse(self, model: PreTrainedModel) -> None:
        """Raise DataError for a context that the model has no positions for. model: an outline will do."""
        longest = max([*self.lengths, *map(len, self.texts)])
        check_length(model, longest, self.new_tokens, "the longest context")


@dataclass(frozen=True)
class Cell:
    """One figure of the grid."""

    arm: str
    method: Method
    batch: int
    tokens: int
    text: tuple[int, ...] | None = None

    def __str__(self) -> str:
        what = f"transformers {self.arm}" if self.arm in OWN else f"{self.arm} {self.method}"
        return f"{what}, {self.batch} x {self.tokens} tokens"


def cells(grid: Grid) -> Iterator[Cell]:
    """Small contexts first; what compiles comes last, arm by arm."""
    contexts: list[tuple[int, tuple[int, ...] | None]] = [(length, None) for length in sorted(set(grid.lengths))]
    contexts = [(len(text), tuple(text)) for text in grid.texts] or contexts
    shapes = sorted(itertools.product(contexts, sorted(set(grid.batches))), key=lambda shape: shape[0][0] * shape[1])
    arms = [arm for arm in ARMS if arm in grid.arms]
    order = list(itertools.product(shapes, [arm for arm in arms if arm in _QUICK]))
    order += [(shape, arm) for arm in arms if arm not in _QUICK for shape in shapes]
    for ((tokens, text), batch), arm in order:
        for method in [_FULL] if arm in OWN else grid.methods:
            yield Cell(arm, method, batch, tokens, text)


def bench(
    model: PreTrainedModel,
    grid: Grid,
    record: Record,
    *,
    tokenizer: Any = None,
    on_cell: Callable[[Cell, int, int], None] = lambda cell, number, total: None,
) -> None:
    """Fill the record: `gates`, `rates`, `figures`; `left_out`, cells without a figure and why; `stopped`, by errors.

    A method whose gate fails is not timed. Every figure is a median over `grid.repeat` runs behind one that warms up;
    decode steps of all runs count, without the first ones of each. Beside it stands the roofline: the bytes that it
    cannot do without over the measured bandwidth (for a prompt also its products over the measured rate of products).
    on_cell: told before each cell, with its number and how many there are.
    Raises KVFoundryError, before anything is timed, for what the model cannot be asked; tokenizer is for methods that
    repeat their context.
    """
    grid.refuse(model)
    _refuse_methods(model, grid.methods, tokenizer)
    record.content |= {"left_out": [], "stopped": []}
    record.save()
    device = input_device(model)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # events are those of the current one
        _measure(model, grid, record, tokenizer, on_cell)


def _measure(
    model: PreTrainedModel, grid: Grid, record: Record, tokenizer: Any, on_cell: Callable[[Cell, int, int], None]
) -> None:
    roofline = _rates(record, model)
    right = _gates(record, model, grid, tokenizer)
    runner = Runner(model, tokenizer, geometry(model), grid.prefill_chunk, grid.random_rows)
    bench = _Bench(model, grid, record, runner, roofline)
    wanted = list(cells(grid))
    todo = [cell for cell in wanted if cell.arm in OWN or cell.method in right]
    for cell in wanted:
        if cell.arm not in OWN and cell.method not in right:
            bench.leave_out(cell, "its gate found it wrong")
    for number, cell in enumerate(todo):
        on_cell(cell, number, len(todo))
        try:
            record.check_time()
        except OutOfTime:
            for left in todo[number:]:
                bench.leave_out(left, "the time was up")
            break
        bench.attempt(cell)
    record.save()


class _Bench:
    """What all cells share."""

    def __init__(self, model: PreTrainedModel, grid: Grid, record: Record, runner: Runner, roofline: Roofline):
        self.model, self.grid, self.record, self.runner, self.roofline = model, grid, record, runner, roofline
        self._before: tuple[Any, ...] | None = None

    def leave_out(self, cell: Cell, reason: str, **more: str) -> None:
        """Name a cell that has no figure."""
        self.record.say(f"left out: {cell}: {reason}")
        self.record.content["left_out"].append({**_named(cell), "reason": reason, **more})
        self.record.save()

    def attempt(self, cell: Cell) -> None:
        """Measure a cell, or say why it has no figure."""
        self._forget(cell)
        try:
            self.measure(cell)
        except NotServed as error:
            self.leave_out(cell, str(error))
        except torch.OutOfMemoryError:
            self.leave_out(cell, f"out of memory on {input_device(self.model).type}")
        except Exception as error:  # what is measured, and what still can be, is worth more than the end of the run
            self.record.content["stopped"].append(str(cell))
            self.leave_out(cell, f"stopped: {_first_line(error)}", traceback=traceback.format_exc())
        finally:
            self.runner.clear()

    def _forget(self, cell: Cell) -> None:
        """What was compiled before is in the way: torch compiles a function anew only so often.

        A static cache makes it do so for every shape; a step of the engine is compiled once for all.
        """
        before, now = self._before, (cell.arm, cell.batch, cell.tokens, cell.text)
        if before != now and (
            cell.arm == "static" or (cell.arm == "compiled" and (not before or before[0] != cell.arm))
        ):
            torch.compiler.reset()
        self._before = now
        self.runner.clear()

    def ids(self, cell: Cell) -> Tensor:
        """[batch, tokens], the same for all arms."""
        device = input_device(self.model)
        if cell.text is not None:
            return torch.tensor([cell.text] * cell.batch, device=device)
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator().manual_seed(self.grid.seed)
        low = min(3, vocabulary - 1)  # the first ones are often special tokens
        return torch.randint(low, vocabulary, (cell.batch, cell.tokens), generator=generator).to(device)

    def measure(self, cell: Cell) -> None:
        """One figure of the record."""
        ids, runs, first = self.ids(cell), list[Run](), None
        steps = self.grid.new_tokens - 1
        for number in range(self.grid.repeat + 1):
            if number > 1:
                try:
                    self.record.check_time()
                except OutOfTime:
                    break
            run = self.runner.run(cell.arm, cell.method, ids, self.grid.new_tokens, skip=min(4, steps // 4))
            if number:
                runs.append(run)
            else:  # compiles, records and warms up
                first = run
        assert first is not None
        self.record.content["figures"].append(self._figure(cell, first, runs))
        self.record.save()

    def _figure(self, cell: Cell, first: Run, runs: list[Run]) -> dict[str, Any]:
        """first: of an engine the run whose peak counts, since later ones begin with the buffers that it has left."""
        model, layers, last = self.model, self.runner.layers, runs[-1]
        itemsize = model.dtype.itemsize
        full = row_bytes(layers, cell.tokens, itemsize) * cell.batch
        weights, flops = weight_bytes(model, cell.batch), prompt_flops(model, layers, cell.tokens, cell.batch)
        decode = self.roofline.beside(
            [step for run in runs for step in run.steps], weights + last.read, linked=last.linked
        )
        whole = weight_bytes(model, cell.batch * cell.tokens)
        least = self.roofline.seconds(whole + full, flops)
        firsts = [run.ttft for run in runs if run.ttft is not None]
        ttft = statistics.median(firsts) if firsts else None
        filled = {} if ttft is not None else {"context": "random rows"}
        return {
            **_named(cell),
            **filled,
            **decode,
            "tokens_per_s": cell.batch * 1e3 / decode["ms"],
            "ttft_ms": None if ttft is None else ttft * 1e3,
            "ttft_runs_ms": [each * 1e3 for each in firsts],
            "ttft_roofline_ms": least * 1e3,
            "ttft_times_roofline": None if ttft is None else ttft / least,
            "ttft_bound": self.roofline.bound(whole + full, flops),
            "peak_bytes": first.peak if last.static else max(run.peak for run in runs),
            "stored_bytes": last.stored,
            "static_bytes": last.static,
            "host_bytes": last.host,
            "full_bytes": full,
            "read_bytes": weights + last.read,
            "kept_share": last.kept_share,
            "notes": last.notes,
        }


def _named(cell: Cell) -> dict[str, Any]:
    context = "random ids" if cell.text is None else "a given prompt"
    return {
        "arm": cell.arm, "method": str(cell.method), "batch": cell.batch, "tokens": cell.tokens, "context": context
    }  # fmt: skip


def _rates(record: Record, model: PreTrainedModel) -> Roofline:
    """Measure how fast the device is, and note it."""
    device = input_device(model)
    links = link_rates(device)
    found = Roofline(copy_rate(device), matmul_rate(device, model.dtype), links.get("host_to_device"))
    record.content["rates"] = {
        "copy_bytes_per_s": found.bytes_per_s,
        "matmul_flops_per_s": found.flops_per_s,
        **{f"{name}_bytes_per_s": rate for name, rate in {**links, **disk_rates(record.path.parent)}.items()},
    }
    record.save()
    return found


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _refuse_methods(model: PreTrainedModel, methods: Sequence[Method], tokenizer: Any) -> None:
    for method in methods:
        KVCache(model, method)  # raises what does not go together
        if method.reconstructs is not None and tokenizer is None:
            raise SpecError(f"{method} asks in words for its context again, and random weights have no tokenizer.")


def _gates(record: Record, model: PreTrainedModel, grid: Grid, tokenizer: Any) -> list[Method]:
    """The methods that are right."""
    tokens = max([*grid.lengths, *map(len, grid.texts)])
    if not set(grid.arms) - set(OWN):
        return list(grid.methods)
    engine = bool({"engine", "compiled"} & set(grid.arms))
    small = in_float32(model)
    right = []
    for method in grid.methods:
        try:
            passed = check(record, small, method, tokenizer, tokens, engine=engine)
        except KVFoundryError as error:
            if small is model:
                raise
            # what was measured on this model (calibrations, tables of heads) is not for another one
            record.note(f"{method}: compared in {model.dtype}: {error}")
            passed = check(record, model, method, tokenizer, tokens, engine=engine)
        except Exception as error:  # the method is not to be trusted; the others may be right
            record.note(f"{method}: {traceback.format_exc()}")
            passed = record.gate(f"{method}: stopped: {_first_line(error)}", math.inf, 0.0)
        if passed:
            right.append(method)
    return right
