"""`kvfoundry analyze heads`: a measurement of a model that a method takes as a parameter."""

from pathlib import Path
from typing import Annotated

import typer

from kvfoundry.cli.options import DeviceOption, DtypeOption, ModelOption, SeedOption


def heads(
    model: ModelOption = "smollm2",
    out: Annotated[Path, typer.Option("--out", help="JSON file to write the head table to.")] = Path("heads.json"),
    variant: Annotated[
        str, typer.Option("--variant", help="What the needle asks for: retrieval or reasoning.")
    ] = "retrieval",
    measure: Annotated[str, typer.Option("--measure", help="top (HeadKV), mass, or copy (Retrieval Head).")] = "top",
    answers: Annotated[
        str, typer.Option("--answers", help="forced: feed the right answer; generated: let the model write it.")
    ] = "forced",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of a probe.")] = 1024,
    probes: Annotated[int, typer.Option("--probes", min=1, help="Number of probes, at evenly spaced depths.")] = 12,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Measure how much every head retrieves, for headkv(table=...)."""
    from kvfoundry.errors import DataError

    if not out.parent.is_dir():
        raise DataError(f"cannot write the head table {str(out)!r}: its folder does not exist.")
    import kvfoundry
    from kvfoundry.analysis.heads import measure_heads

    loaded, tokenizer = kvfoundry.load(model, device=device, dtype=dtype)
    scores = measure_heads(
        loaded,
        tokenizer,
        variant=variant,  # type: ignore[arg-type]
        measure=measure,  # type: ignore[arg-type]
        answers=answers,  # type: ignore[arg-type]
        tokens=tokens,
        probes=probes,
        seed=seed,
        on_probe=lambda done: typer.echo(f"\rprobe {done} of {probes}", nl=done == probes, err=True),
    )
    beside = scores.save(out)
    for layer, head, score in scores.best(10):
        typer.echo(f"layer {layer:3d}  head {head:3d}  {score:.4f}")
    share = scores.about["answer_tokens_right"]
    typer.echo(
        f"{out} (and {beside.name}); the model's own next token was right for {share:.0%} of the answers' tokens"
    )
