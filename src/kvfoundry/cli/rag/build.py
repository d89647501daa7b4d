"""`kvfoundry rag build`: the keys and values of every passage that a question may need."""

import json
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfoundry.cli.options import DeviceOption, DtypeOption, Interrupted, JsonOption, ModelOption
from kvfoundry.cli.rag.progress import progress_bar

if TYPE_CHECKING:
    from kvfoundry.rag.kv_file import KvFile


def build(
    retrieval: Annotated[Path, typer.Option("--retrieval", help="File of kvfoundry rag retrieve.")],
    data: Annotated[
        Path | None, typer.Option("--data", help="The file of questions that it was made for. (default: our own)")
    ] = None,
    top: Annotated[
        int | None, typer.Option("--top-k", "--k", help="How many may begin on the device. (default: all found)")
    ] = None,
    device_size: Annotated[
        str, typer.Option("--device-size", help="Room for passages on the device: 64MiB, 50% of a sample's, or all.")
    ] = "all",
    placeholders: Annotated[
        str, typer.Option("--placeholders", help="What waits for the others: kv (on the host), or text and summaries.")
    ] = "kv",
    which: Annotated[
        str, typer.Option("--from", help="own: passages of the sample; corpus: what the whole-corpus search found.")
    ] = "own",
    behind: Annotated[
        str,
        typer.Option("--behind", help="What a passage is read behind: head, start, or sample (all that precede it)."),
    ] = "head",
    chunk_method: Annotated[
        str, typer.Option("--chunk-method", help="How chunks are stored: fullkv, or a codec such as int8.")
    ] = "fullkv",
    summary: Annotated[str, typer.Option("--summary", help="Of absent keys: centroid or bounds.")] = "centroid",
    page: Annotated[int, typer.Option("--summary-page", min=1, help="Tokens that share one summary.")] = 8,
    save_cache_dir: Annotated[
        Path, typer.Option("--save-cache-dir", help="Folder where chunks and summaries are kept.")
    ] = Path("results/kv_caches/store"),
    load_cache_dir: Annotated[
        Path | None, typer.Option("--load-cache-dir", help="Folder of chunks of before. (default: the one saved to)")
    ] = None,
    store_size: Annotated[str, typer.Option("--store-size", help="What the folder may hold.")] = "64GiB",
    new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Room to leave for an answer.")] = 16,
    model: ModelOption = "smollm2",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    out: Annotated[Path, typer.Option("--out", help="Folder for the summary.")] = Path("results/kv_caches"),
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first so many samples.")] = None,
    as_json: JsonOption = False,
) -> dict[str, Path]:
    """Compute the keys and values of all candidate passages once: <dataset>_kv_top<k>.json and a folder of chunks.

    What is stored already is skipped; an interrupted run goes on. Bad samples are named and left out.
    """
    from kvfoundry.checks import choice
    from kvfoundry.cli.options import load_model
    from kvfoundry.evaluate.tasks.ragqa_data import OWN_DATA
    from kvfoundry.method import Method
    from kvfoundry.rag.build import build as build_all
    from kvfoundry.rag.dataset import load_dataset
    from kvfoundry.rag.kv_file import kv_path
    from kvfoundry.rag.making import Maker
    from kvfoundry.rag.opening import open_store
    from kvfoundry.rag.prompts import lay_out_all
    from kvfoundry.rag.retrieval_file import Retrieval
    from kvfoundry.rag.room import Room
    from kvfoundry.rag.summaries import KINDS

    choice("--placeholders", placeholders, ("kv", "text"))
    choice("--from", which, ("own", "corpus"))
    choice("--behind", behind, ("head", "start", "sample"))
    choice("--summary", summary, KINDS)
    room, method = Room.parse(device_size), Method.parse(chunk_method)
    found = Retrieval.load(retrieval)
    dataset = load_dataset(data or OWN_DATA)
    found.passages(dataset)  # a file of other data is refused before a model is loaded
    loaded, tokenizer = load_model(model, device, dtype)
    wanted = found.k if top is None else top
    prompts, skipped = lay_out_all(
        tokenizer, loaded, dataset, found, top=wanted, new_tokens=new_tokens, limit=limit,
        which=which, behind=behind,  # type: ignore[arg-type]
    )  # fmt: skip
    for line in skipped[:3]:
        typer.echo(f"note: sample left out: {line}", err=True)
    settings = {"top": wanted, "from": which, "behind": behind, "method": str(method), "store": str(save_cache_dir)}
    path = kv_path(out, dataset.name, wanted)
    try:
        with ExitStack() as opened:
            store = opened.enter_context(open_store(save_cache_dir, store_size))
            also = None
            if load_cache_dir is not None and load_cache_dir.resolve() != save_cache_dir.resolve():
                also = opened.enter_context(open_store(load_cache_dir, store_size, exists=True))
            on_progress = opened.enter_context(progress_bar(not as_json))
            maker = Maker(
                loaded, tokenizer, store, method, save_cache_dir, summary, page, also=also,  # type: ignore[arg-type]
            )  # fmt: skip
            made = build_all(
                maker, prompts, dataset, found, room=room, placeholders=placeholders,  # type: ignore[arg-type]
                settings=settings, skipped=skipped, on_progress=on_progress,
            )  # fmt: skip
    except KeyboardInterrupt as error:
        again = shlex.join(["kvfoundry", *sys.argv[1:]])
        raise Interrupted(f"interrupted; stored chunks are kept. Go on with: {again}") from error
    made.save(path)
    _tell(made, path, as_json)
    return {"kv": path}


def _tell(made: "KvFile", path: Path, as_json: bool) -> None:
    totals: dict[str, Any] = made.totals()
    if as_json:
        typer.echo(json.dumps({"file": str(path), "samples": len(made.samples), "totals": totals,
                               "skipped": len(made.skipped), "seconds": made.seconds}, indent=1))  # fmt: skip
        return
    new = sum(chunk.seconds > 0 for sample in made.samples for chunk in sample.chunks)
    typer.echo(f"{len(made.samples)} samples in {made.seconds:.1f} s; {new} chunks computed or summarized now")
    names = {"device": "begin on the device", "host": "wait on the host", "text": "are text and a summary"}
    for tier, own in totals.items():
        typer.echo(f"{own['chunks']} chunks, {own['tokens']} tokens, {own['bytes'] / 2**20:.1f} MiB {names[tier]}")
    typer.echo(f"{path}")
