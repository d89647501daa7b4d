"""`kvfoundry analyze passages|cache-size|cache-bench`: lengths of passages, sizes of caches, and what chunks cost."""

from typing import Annotated

import typer

from kvfoundry.cli.analyze.options import DEFAULT_OUT, OutOption, PassagesOption, SamplesOption, tell
from kvfoundry.cli.options import DeviceOption, DtypeOption, ModelOption, SkipDamagedOption


def passage_lengths(
    model: ModelOption = "smollm2",
    data: SamplesOption = None,
    out: OutOption = DEFAULT_OUT,
    skip_damaged: SkipDamagedOption = False,
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
    tell(
        paths,
        f"{made['different_passages']} passages, {made['passages_per_sample']:g} per sample: half of them are within "
        f"{one['p50']:g} tokens, 95 % within {one['p95']:g}, the longest has {one['most']}",
    )


def cache_sizes(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="Repeat: a model, a config.json, or llama-3.1-8b, ... (default: a handful)"),
    ] = None,
    gpu: Annotated[list[str] | None, typer.Option("--gpu", help="Repeat: a card or a size such as 24GiB.")] = None,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", help="Repeat: bfloat16, float16, float32.")] = None,
    method: Annotated[str, typer.Option("--method", help="Method spec. (default: the full cache)")] = "fullkv",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences at once.")] = 1,
    out: OutOption = DEFAULT_OUT,
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
    tell(paths, *lines)


def cache_benchmark(
    model: ModelOption = "smollm2",
    data: SamplesOption = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="Repeat: how chunks are stored. (default: fullkv and int8)")
    ] = None,
    blend: Annotated[str, typer.Option("--blend", help="How chunks are made into a prompt.")] = "blend(ratio=0.15)",
    passages: PassagesOption = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Rounds; medians are shown.")] = 3,
    out: OutOption = DEFAULT_OUT,
    skip_damaged: SkipDamagedOption = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
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
    tell(paths, *lines)
