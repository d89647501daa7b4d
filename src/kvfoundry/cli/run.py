"""`kvfoundry run`: one prompt, or a file of prompts, under one or several methods."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvfoundry.cli.options import (
    BudgetOption,
    ChatOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    MethodOption,
    ModelOption,
    PrefillOption,
    SeedOption,
    load_model,
    parse_budgets,
    read_prompts,
)
from kvfoundry.errors import KVFoundryError

MIB = 1024 * 1024


def run(
    prompt: Annotated[str | None, typer.Argument(help="The prompt.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A text file with one prompt per line.")] = None,
    model: ModelOption = "smollm2",
    method: MethodOption = None,
    budget: BudgetOption = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer in tokens.")] = 64,
    batch_size: Annotated[
        int | None,
        typer.Option("--eval-batch-size", "--eval_batch_size", min=1, help="Prompts per batch. (default: all)"),
    ] = None,
    chat: ChatOption = None,
    prefill_chunk: PrefillOption = None,
    seed: SeedOption = 0,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print the answer as it is made; one prompt, one method.")
    ] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt, or every line of a file, and say what the cache held."""
    prompts, budgets = read_prompts(prompt, file), parse_budgets(budget)
    import kvfoundry
    from kvfoundry.evaluate.arms import expand_arms
    from kvfoundry.evaluate.prompts import encode_prompt, resolve_chat
    from kvfoundry.feeding import check_length

    arms = expand_arms(method or ["fullkv"], budgets)
    if stream and (as_json or len(prompts) * len(arms) > 1):
        raise KVFoundryError("--stream prints one answer as text; leave out --json and give one prompt and one method.")
    loaded, tokenizer = load_model(model, device, dtype)
    with_template = resolve_chat(tokenizer, chat)
    for number, text in enumerate(prompts, start=1):
        what = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        check_length(loaded, len(encode_prompt(tokenizer, text, with_template)), max_new_tokens, what)
    streamer = None
    if stream:
        from transformers import TextStreamer

        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    records = []
    for arm in arms:
        generations = kvfoundry.generate(
            loaded,
            tokenizer,
            prompts,
            method=arm,
            max_new_tokens=max_new_tokens,
            chat=with_template,
            batch_size=batch_size,
            prefill_chunk=prefill_chunk,
            streamer=streamer,
            seed=seed,
            details=True,
        )
        for text, generation in zip(prompts, generations, strict=True):
            records.append({"prompt": text, "method": str(arm), **asdict(generation)})
            if as_json:
                continue
            if len(arms) > 1:
                typer.secho(f"[{arm}]", bold=True)
            if not stream:
                typer.echo(generation.text)
            typer.secho(
                f"{generation.prompt_tokens} + {generation.new_tokens} tokens, "
                f"cache {generation.stored_bytes / MIB:.2f} MiB ({generation.kept_share:.0%} of the rows kept), "
                + (f"{generation.parked_bytes / MIB:.2f} MiB in host memory, " if generation.parked_bytes else "")
                + f"{generation.seconds:.1f} s",
                dim=True,
                err=True,
            )
            for note in generation.notes:
                typer.secho(f"note: {note}", dim=True, err=True)
    if as_json:
        typer.echo(json.dumps(records, indent=1, ensure_ascii=False))
