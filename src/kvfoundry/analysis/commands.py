"""The commands of `kvfoundry analyze`: each leaves a JSON file and a picture in one folder, and says what it found."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfoundry.analysis.command import analyze_app

if TYPE_CHECKING:
    from kvfoundry.analysis.traces import Trace

_OUT = Path("results/analysis")

Model = Annotated[str, typer.Option("--model", help="Embedded model, hub name, local folder or .gguf file.")]
Data = Annotated[
    Path | None, typer.Option("--data", help="JSON of samples with question, answers, ctxs. (default: our own set)")
]
Out = Annotated[Path, typer.Option("--out", help="Folder for the JSON file and the picture.")]
Limit = Annotated[int, typer.Option("--limit", min=1, help="Samples to look at.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Most tokens of an answer.")]
Passages = Annotated[
    int | None,
    typer.Option(
        "--passages", min=1, help="Passages of a sample; others of the data come along. (default: own set 10)"
    ),
]
ChunkTokens = Annotated[
    int | None,
    typer.Option(
        "--chunk-tokens", min=1, help="Cut passages into chunks of so many tokens. (default: a passage is one)"
    ),
]
SkipDamaged = Annotated[bool, typer.Option("--skip-damaged", help="Leave damaged samples out instead of stopping.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, ...")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16, ...")]


def _traced(
    model: str, data: Path | None, device: str, dtype: str, **how: Any
) -> tuple[Any, list["Trace"], dict[str, Any]]:
    """The tokenizer, the traces, and what every result says about them."""
    import kvfoundry
    from kvfoundry.analysis.prompts import samples_of
    from kvfoundry.analysis.traces import traces

    names = ("limit", "passages", "skip_damaged")
    samples_of(
        data, **{name: how[name] for name in names}
    )  # what is wrong with the data is said before a model is loaded
    loaded, tokenizer = kvfoundry.load(model, device=device, dtype=dtype)
    found = traces(
        loaded,
        tokenizer,
        data,
        on_skip=lambda sentence: typer.echo(f"note: {sentence}", err=True),
        on_trace=lambda done, of: typer.echo(f"\rsample {done} of {of}", nl=done == of, err=True),
        **how,
    )
    about = {
        "model": model,
        "data": "kvfoundry" if data is None else str(data),
        "samples": len(found),
        "steps": how["steps"],
        "chunks": "passages" if how["chunk_tokens"] is None else f"{how['chunk_tokens']} tokens",
    }
    return tokenizer, found, about


def _tell(paths: Sequence[Path], *lines: str) -> None:
    for line in lines:
        typer.echo(line)
    typer.echo("written: " + ", ".join(map(str, paths)))


@analyze_app.command()
def attention(
    model: Model = "smollm2",
    data: Data = None,
    out: Out = _OUT,
    limit: Limit = 4,
    steps: Steps = 16,
    passages: Passages = None,
    chunk_tokens: ChunkTokens = None,
    skip_damaged: SkipDamaged = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Map the attention of every decode step and layer over the passages: JSON, picture and an HTML page."""
    from kvfoundry.analysis.attention import attention as analyse
    from kvfoundry.analysis.results import prepared

    folder = prepared(out)
    tokenizer, found, about = _traced(
        model, data, device, dtype,
        limit=limit, steps=steps, passages=passages, chunk_tokens=chunk_tokens, skip_damaged=skip_damaged,
    )  # fmt: skip
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
    _tell(paths, *lines)


@analyze_app.command()
def coverage(
    model: Model = "smollm2",
    data: Data = None,
    out: Out = _OUT,
    limit: Limit = 4,
    steps: Steps = 16,
    passages: Passages = None,
    chunk_tokens: ChunkTokens = None,
    skip_damaged: SkipDamaged = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Count the chunks that hold 50 to 99 % of the attention to the passages."""
    from kvfoundry.analysis.coverage import coverage as analyse
    from kvfoundry.analysis.results import prepared

    folder = prepared(out)
    _, found, about = _traced(
        model, data, device, dtype,
        limit=limit, steps=steps, passages=passages, chunk_tokens=chunk_tokens, skip_damaged=skip_damaged,
    )  # fmt: skip
    made, paths = analyse(found, folder, about)
    mean = made["chunks"]["mean"]
    _tell(paths, *(f"{float(s):.0%} of the attention: {n:.1f} of {mean:.1f} chunks" for s, n in made["needed"].items()))


@analyze_app.command()
def sparsity(
    model: Model = "smollm2",
    data: Data = None,
    out: Out = _OUT,
    limit: Limit = 4,
    steps: Steps = 16,
    passages: Passages = None,
    chunk_tokens: ChunkTokens = None,
    threshold: Annotated[
        float, typer.Option("--threshold", min=0.0, help="A chunk is idle below this times an even share.")
    ] = 0.5,
    skip_damaged: SkipDamaged = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Show how many chunks the decode steps leave nearly unread."""
    from kvfoundry.analysis.results import prepared
    from kvfoundry.analysis.sparsity import sparsity as analyse

    folder = prepared(out)
    _, found, about = _traced(
        model, data, device, dtype,
        limit=limit, steps=steps, passages=passages, chunk_tokens=chunk_tokens, skip_damaged=skip_damaged,
    )  # fmt: skip
    made, paths = analyse(found, folder, about, threshold)
    _tell(paths, f"idle chunks {made['idle']['mean']:.1%}, read as if evenly {made['effective']['mean']:.1%} of them")


@analyze_app.command()
def drift(
    model: Model = "smollm2",
    data: Data = None,
    out: Out = _OUT,
    limit: Limit = 4,
    steps: Steps = 16,
    passages: Passages = None,
    skip_damaged: SkipDamaged = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Compare the attention of neighbouring steps (coherence), and of every step with the first (drift)."""
    from kvfoundry.analysis.drift import drift as analyse
    from kvfoundry.analysis.results import prepared

    folder = prepared(out)
    _, found, about = _traced(
        model, data, device, dtype,
        limit=limit, steps=steps, passages=passages, chunk_tokens=None, skip_damaged=skip_damaged,
    )  # fmt: skip
    made, paths = analyse(found, folder, about)
    _tell(
        paths, f"similarity to the step before {made['local']['mean']:.3f}, to the first {made['to_first']['mean']:.3f}"
    )


@analyze_app.command(name="passages")
def passage_lengths(
    model: Model = "smollm2", data: Data = None, out: Out = _OUT, skip_damaged: SkipDamaged = False
) -> None:
    """Count the tokens of the passages of a dataset, in the model's own tokens."""
    from kvfoundry.analysis.passages import passages as analyse
    from kvfoundry.analysis.results import prepared
    from kvfoundry.evaluate.tasks.ragqa_data import OWN_DATA, load_ragqa
    from kvfoundry.models import outline

    folder = prepared(out)
    read = load_ragqa(data or OWN_DATA, skip_damaged)
    _, tokenizer = outline(model)
    about = {"model": model, "data": "our own set" if data is None else data.name, "sha256": read.digest}
    made, paths = analyse(tokenizer, read, folder, about)
    one = made["passage_tokens"]
    _tell(
        paths,
        f"{made['different_passages']} passages, {made['passages_per_sample']:g} per sample: half of them are within "
        f"{one['p50']:g} tokens, 95 % within {one['p95']:g}, the longest has {one['most']}",
    )


@analyze_app.command(name="cache-size")
def cache_sizes(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="Repeat: a model, a config.json, or llama-3.1-8b, ... (default: a handful)"),
    ] = None,
    gpu: Annotated[list[str] | None, typer.Option("--gpu", help="Repeat: a card or a size such as 24GiB.")] = None,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", help="Repeat: bfloat16, float16, float32.")] = None,
    method: Annotated[str, typer.Option("--method", help="Method spec. (default: the full cache)")] = "fullkv",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences at once.")] = 1,
    out: Out = _OUT,
) -> None:
    """Draw the size of the cache against the length of the text, for models, dtypes and GPUs; no weights are read."""
    from kvfoundry.analysis.cache_size import DEFAULT_MODELS
    from kvfoundry.analysis.cache_size import cache_size as analyse
    from kvfoundry.analysis.results import prepared
    from kvfoundry.planning.memory import memory_of

    folder = prepared(out)
    cards = [memory_of(text) for text in gpu or ("rtx4090", "a100-80gb", "h200")]
    made, paths = analyse(model or DEFAULT_MODELS, dtype or ["bfloat16"], cards, folder, batch=batch, method=method)
    lines = []
    for line in made["models"]:
        room = ", ".join(f"{card} {fit['longest_tokens']:,}" for card, fit in line["beside_the_weights"].items())
        per_token = f"{line['bytes_per_token'] / 1024:,.1f} KiB per token"
        lines.append(f"{line['model']} {line['dtype']}: {per_token}; tokens beside the weights: {room}")
    _tell(paths, *lines)


@analyze_app.command(name="cache-bench")
def cache_benchmark(
    model: Model = "smollm2",
    data: Data = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="Repeat: how chunks are stored. (default: fullkv and int8)")
    ] = None,
    blend: Annotated[str, typer.Option("--blend", help="How chunks are made into a prompt.")] = "blend(ratio=0.15)",
    passages: Passages = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Rounds; medians are shown.")] = 3,
    out: Out = _OUT,
    skip_damaged: SkipDamaged = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure chunks: bytes, and milliseconds to compute, store, fetch, promote and blend them."""
    import kvfoundry
    from kvfoundry.analysis.cache_bench import cache_bench as analyse
    from kvfoundry.analysis.prompts import samples_of
    from kvfoundry.analysis.results import prepared

    folder = prepared(out)
    specs = [str(kvfoundry.Method.parse(spec)) for spec in method or ("fullkv", "int8")]
    samples = samples_of(data, limit=1, passages=passages, skip_damaged=skip_damaged)
    loaded, tokenizer = kvfoundry.load(model, device=device, dtype=dtype)
    about = {"model": model, "dtype": str(loaded.dtype).removeprefix("torch."), "device": str(loaded.device)}
    made, paths = analyse(loaded, tokenizer, samples, specs, folder, about, repeat=repeat, blend=blend)
    lines = []
    for row in made["chunks"]:
        spent = ", ".join(f"{name} {ms:g} ms" for name, ms in row["milliseconds"].items())
        lines.append(
            f"{row['method']}: {row['chunk_bytes']:,} bytes a chunk (planned {row['planned_bytes']:,}); {spent}"
        )
    lines += [f"first token {row['how']}: {row['milliseconds']:g} ms" for row in made["first_token"]]
    _tell(paths, *lines)
