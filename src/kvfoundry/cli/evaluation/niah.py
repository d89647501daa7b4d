"""`kvfoundry eval niah`: a fact hidden in a long text."""

from typing import Annotated

import typer

from kvfoundry.cli.evaluation.options import EvalOptions, with_eval_options
from kvfoundry.cli.evaluation.run import run_tasks
from kvfoundry.cli.options import HaystackOption, parse_numbers
from kvfoundry.errors import KVFoundryError, unknown_name
from kvfoundry.evaluate.tasks.needle_scores import SCORES
from kvfoundry.evaluate.tasks.needles import KINDS
from kvfoundry.evaluate.tasks.placement import PLACEMENTS, depth_grid


def _one_of(names: dict[str, str]) -> str:
    return "; ".join(f"{name}: {meaning}" for name, meaning in names.items()) + "."


@with_eval_options
def niah(
    lengths: Annotated[
        list[str] | None,
        typer.Option(
            "--lengths", help="Prompt lengths in the model's tokens; repeat or use commas. (default: 1024,2048)"
        ),
    ] = None,
    s_len: Annotated[
        int | None, typer.Option("--s_len", "--s-len", help="First of evenly spaced lengths, instead of --lengths.")
    ] = None,
    e_len: Annotated[int | None, typer.Option("--e_len", "--e-len", help="Their last, if a step ends there.")] = None,
    step: Annotated[int | None, typer.Option("--step", help="The step between them.")] = None,
    depths: Annotated[
        list[str] | None,
        typer.Option("--depths", help="Needle depths in percent; repeat or use commas. (default: 0,25,50,75,100)"),
    ] = None,
    depth_intervals: Annotated[
        int | None, typer.Option("--depth-intervals", help="So many evenly spaced depths, instead of --depths.")
    ] = None,
    depth_spacing: Annotated[
        str, typer.Option("--depth-spacing", help="Of --depth-intervals: linear, or sigmoid with more near both ends.")
    ] = "linear",
    placement: Annotated[str, typer.Option("--placement", help=_one_of(PLACEMENTS))] = "nearest",
    score: Annotated[str, typer.Option("--score", help=_one_of(SCORES))] = "recovered",
    kind: Annotated[
        str, typer.Option("--kind", help=_one_of({name: kind.summary for name, kind in KINDS.items()}))
    ] = "word",
    needles: Annotated[int, typer.Option("--needles", help="Facts hidden and asked for at once.")] = 1,
    distractors: Annotated[int, typer.Option("--distractors", help="Facts about other keys, to be told apart.")] = 0,
    repeats: Annotated[int, typer.Option("--repeats", help="Items per length and depth.")] = 1,
    haystack: HaystackOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Longest answer in tokens, for each needle.")
    ] = 24,
    plot: Annotated[
        str | None, typer.Option("--plot", help="png or svg: also draw niah.png or niah.svg, heat maps of all methods.")
    ] = None,
    *,
    options: EvalOptions,
) -> None:
    """Needle in a haystack: a fact hidden in a long text, over lengths and depths."""
    from kvfoundry.evaluate.picture import FORMATS, draw_heat_maps, require_matplotlib
    from kvfoundry.evaluate.tasks.niah import NeedleTask

    if plot is not None:
        if plot not in FORMATS:
            raise KVFoundryError(unknown_name("picture format", plot, FORMATS))
        require_matplotlib()
    task = NeedleTask(
        lengths=_lengths(lengths, s_len, e_len, step),
        depths=_depths(depths, depth_intervals, depth_spacing),
        kind=kind,
        needles=needles,
        distractors=distractors,
        repeats=repeats,
        haystack=haystack,
        max_new_tokens=max_new_tokens,
        placement=placement,
        scoring=score,
    )
    draw = None if plot is None else lambda lines: draw_heat_maps(lines, options.out / f"niah.{plot}")
    run_tasks([task], options, draw=draw)


def _lengths(lengths: list[str] | None, s_len: int | None, e_len: int | None, step: int | None) -> tuple[int, ...]:
    """The lengths that are named, or those from s_len to e_len, both included where the steps end there."""
    spaced = (s_len, e_len, step)
    if spaced == (None, None, None):
        return tuple(parse_numbers(lengths or ["1024,2048"], int, "--lengths"))
    if lengths:
        raise KVFoundryError("--lengths and --s_len exclude each other; give one of them.")
    if s_len is None or e_len is None or step is None:
        raise KVFoundryError("--s_len, --e_len and --step belong together; give all three.")
    if step < 1 or s_len < 1 or e_len < s_len:
        raise KVFoundryError(f"no lengths from {s_len} to {e_len} in steps of {step}; give 1 or more, the end last.")
    return tuple(range(s_len, e_len + 1, step))


def _depths(depths: list[str] | None, intervals: int | None, spacing: str) -> tuple[float, ...]:
    if intervals is None:
        return tuple(parse_numbers(depths or ["0,25,50,75,100"], float, "--depths"))
    if depths:
        raise KVFoundryError("--depths and --depth-intervals exclude each other; give one of them.")
    try:
        return depth_grid(intervals, spacing)
    except ValueError as error:
        raise KVFoundryError(f"no {spacing} grid of {intervals} depths; give 2 or more, linear or sigmoid.") from error
