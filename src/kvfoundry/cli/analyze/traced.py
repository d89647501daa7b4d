"""`kvfoundry analyze attention|coverage|sparsity|drift`: where the attention of decode steps goes, step by step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfoundry.cli.analyze.options import (
    DEFAULT_OUT,
    ChunkTokensOption,
    OutOption,
    PassagesOption,
    SamplesOption,
    tell,
)
from kvfoundry.cli.options import DeviceOption, DtypeOption, ModelOption, SkipDamagedOption
from kvfoundry.cli.shared import sharing

if TYPE_CHECKING:
    from kvfoundry.analysis.traces import Trace


@dataclass(frozen=True)
class TraceOptions:
    """What every command takes that looks at answers; `sharing` adds it to a command."""

    model: ModelOption = "smollm2"
    data: SamplesOption = None
    out: OutOption = DEFAULT_OUT
    limit: Annotated[int, typer.Option("--limit", min=1, help="Samples to look at.")] = 4
    steps: Annotated[int, typer.Option("--steps", min=1, help="Most tokens of an answer.")] = 16
    passages: PassagesOption = None
    skip_damaged: SkipDamagedOption = False
    device: DeviceOption = "auto"
    dtype: DtypeOption = "auto"


def _traced(options: TraceOptions, chunk_tokens: int | None = None) -> tuple[Any, list["Trace"], dict[str, Any]]:
    """The tokenizer, the traces, and what every result says about them."""
    import kvfoundry
    from kvfoundry.analysis.prompts import samples_of
    from kvfoundry.analysis.traces import traces

    which: dict[str, Any] = {
        "limit": options.limit, "passages": options.passages, "skip_damaged": options.skip_damaged,
    }  # fmt: skip
    samples_of(options.data, **which)  # what is wrong with the data is said before a model is loaded
    loaded, tokenizer = kvfoundry.load(options.model, device=options.device, dtype=options.dtype)
    found = traces(
        loaded,
        tokenizer,
        options.data,
        on_skip=lambda sentence: typer.echo(f"note: {sentence}", err=True),
        on_trace=lambda done, of: typer.echo(f"\rsample {done} of {of}", nl=done == of, err=True),
        steps=options.steps,
        chunk_tokens=chunk_tokens,
        **which,
    )
    about = {
        "model": options.model,
        "data": "kvfoundry" if options.data is None else str(options.data),
        "samples": len(found),
        "steps": options.steps,
        "chunks": "passages" if chunk_tokens is None else f"{chunk_tokens} tokens",
    }
    return tokenizer, found, about


@sharing(TraceOptions)
def attention(
    chunk_tokens: ChunkTokensOption = None,
    *,
    options: TraceOptions,
) -> None:
    """Map the attention of every decode step and layer over the passages: JSON, picture and an HTML page."""
    from kvfoundry.analysis.attention import attention as analyse
    from kvfoundry.analysis.results import prepared

    folder = prepared(options.out)
    tokenizer, found, about = _traced(options, chunk_tokens)
    texts = {
        trace.prompt.item: {
            part.name: tokenizer.decode(trace.prompt.ids[part.start : part.stop]) for part in trace.prompt.parts
        }
        for trace in found
    }
    made, paths = analyse(found, texts, folder, about)
    lines = []
    for sample in made["samples"]:
        means = [
            sum(step[i] for step in sample["by_step"]) / len(sample["by_step"]) for i in range(len(sample["parts"]))
        ]
        parts = [(mean, part) for mean, part in zip(means, sample["parts"], strict=True) if part["kind"] == "passage"]
        mean, part = max(parts, key=lambda pair: pair[0])
        needed = {True: ", which the answer needs", False: ", which the answer does not need", None: ""}[part["gold"]]
        lines.append(f"{sample['item']}: most attention to {part['name']!r}{needed} ({mean:.1%} of all)")
    tell(paths, *lines)


@sharing(TraceOptions)
def coverage(
    chunk_tokens: ChunkTokensOption = None,
    *,
    options: TraceOptions,
) -> None:
    """Count the chunks that hold 50 to 99 % of the attention to the passages."""
    from kvfoundry.analysis.coverage import coverage as analyse
    from kvfoundry.analysis.results import prepared

    folder = prepared(options.out)
    _, found, about = _traced(options, chunk_tokens)
    made, paths = analyse(found, folder, about)
    mean = made["chunks"]["mean"]
    tell(paths, *(f"{float(s):.0%} of the attention: {n:.1f} of {mean:.1f} chunks" for s, n in made["needed"].items()))


@sharing(TraceOptions)
def sparsity(
    chunk_tokens: ChunkTokensOption = None,
    threshold: Annotated[
        float, typer.Option("--threshold", min=0.0, help="A chunk is idle below this times an even share.")
    ] = 0.5,
    *,
    options: TraceOptions,
) -> None:
    """Show how many chunks the decode steps leave nearly unread."""
    from kvfoundry.analysis.results import prepared
    from kvfoundry.analysis.sparsity import sparsity as analyse

    folder = prepared(options.out)
    _, found, about = _traced(options, chunk_tokens)
    made, paths = analyse(found, folder, about, threshold)
    tell(paths, f"idle chunks {made['idle']['mean']:.1%}, read as if evenly {made['effective']['mean']:.1%} of them")


@sharing(TraceOptions)
def drift(
    *,
    options: TraceOptions,
) -> None:
    """Compare the attention of neighbouring steps (coherence), and of every step with the first (drift)."""
    from kvfoundry.analysis.drift import drift as analyse
    from kvfoundry.analysis.results import prepared

    folder = prepared(options.out)
    _, found, about = _traced(options)
    made, paths = analyse(found, folder, about)
    tell(
        paths, f"similarity to the step before {made['local']['mean']:.3f}, to the first {made['to_first']['mean']:.3f}"
    )
