"""`kvfoundry rag retrieve`: the passages that belong to each question of a file."""

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfoundry.cli.options import DeviceOption, Interrupted, JsonOption
from kvfoundry.cli.rag.progress import progress_bar

if TYPE_CHECKING:
    from kvfoundry.rag.retrieval_file import Retrieval


def retrieve(
    data: Annotated[
        Path | None, typer.Option("--data", help="File with question, answers, ctxs per sample. (default: our own)")
    ] = None,
    k: Annotated[int, typer.Option("--k", "--top-k", help="Passages for each question.")] = 5,
    mode: Annotated[
        str, typer.Option("--mode", help="own: among the sample's passages; corpus: among all; both.")
    ] = "both",
    retriever: Annotated[
        str | None,
        typer.Option("--retriever", help="Such as bm25, maxsim, dense+bm25+ranks. (default: see docs/retrieval.md)"),
    ] = None,
    encoder: Annotated[
        str, typer.Option("--encoder", help="minilm (needs no hub), or a sentence-transformers name or folder.")
    ] = "minilm",
    token_encoder: Annotated[
        str | None, typer.Option("--token-encoder", help="ColBERT checkpoint for maxsim and rerank.")
    ] = None,
    index: Annotated[
        Path | None, typer.Option("--index", help="Folder of an index to add to and search. (default: one in --out)")
    ] = None,
    pool: Annotated[int, typer.Option("--pool", help="Keep about one of so many token vectors.")] = 1,
    exact: Annotated[
        bool, typer.Option("--float", help="Keep vectors in float32 instead of int8: four times as large.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for the result.")] = Path("results/retrieval"),
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first so many samples.")] = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> dict[str, Path]:
    """Find the passages that belong to each question: <dataset>_rag_<mode>_k<k>.json.

    Passages are indexed once; a second run, or one that was interrupted, goes on with what is there. Bad samples are
    named and left out.
    """
    from kvfoundry.evaluate.tasks.ragqa_data import OWN_DATA
    from kvfoundry.rag.dataset import limited, load_dataset, told
    from kvfoundry.rag.retrieval_file import retrieval_path
    from kvfoundry.rag.retrieve import check_k, fill_index
    from kvfoundry.rag.retrieve import retrieve as search
    from kvfoundry.rag.retrievers import DEFAULT, Retriever

    recipe = Retriever.parse(retriever or DEFAULT)
    dataset = limited(load_dataset(data or OWN_DATA), limit)
    # a given index may hold more: what it will hold is known once it is open
    few = check_k(dataset, k, mode, len(dataset.passages) if index is None else sys.maxsize)
    for line in told(dataset):
        typer.echo(f"note: {line}", err=True)
    if few:
        shown = "; ".join(few[:3]) + ("; ..." if few[3:] else "")
        typer.echo(f"note: fewer than k={k} passages: {shown}", err=True)

    path = retrieval_path(out, dataset.name, mode, k)
    opened = _open_index(index, out, dataset.name, recipe.needs, encoder, token_encoder, device, not exact, pool)
    try:
        with progress_bar(shown=not as_json) as on_progress:
            new = fill_index(opened, dataset, only=index is None, on_progress=on_progress)
            if long := sum(name in dataset.passages for name in opened.cut):
                limit_of = opened.encoder.limit if opened.encoder else 0
                typer.echo(
                    f"note: {long} passages are longer than the {limit_of} tokens that the encoder reads; their ends "
                    "count for bm25 and titles only.",
                    err=True,
                )
            found = _present(path, opened, recipe, dataset, k, mode)
            if is_new := found is None:
                found = search(dataset, opened, recipe, k=k, mode=mode, on_progress=on_progress)
                found.save(path)
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"interrupted; indexed passages are kept. Go on with: {shlex.join(['kvfoundry', *sys.argv[1:]])}"
        ) from error
    assert found is not None
    _tell(found, path, new, is_new, as_json)
    return {"retrieval": path}


def _open_index(
    index: Path | None,
    out: Path,
    name: str,
    needs: frozenset[str],
    encoder: str,
    token_encoder: str | None,
    device: str,
    rounded: bool,
    pool: int,
) -> Any:
    from kvfoundry.models import check_device
    from kvfoundry.rag.encoders import open_encoder
    from kvfoundry.rag.index import PassageIndex

    model = open_encoder(encoder, token_encoder, device=str(check_device(device))) if needs else None
    if index is None:
        parts = [name, "index", *sorted(needs)]
        index = out / "_".join(parts)
    return PassageIndex(index, model, keeps=needs, rounded=rounded, pool=pool)


def _present(path: Path, index: Any, recipe: Any, dataset: Any, k: int, mode: str) -> "Retrieval | None":
    """The file of an earlier run that searched the same in the same way."""
    from kvfoundry.rag.retrieval_file import Retrieval
    from kvfoundry.rag.retrieve import about

    if not path.exists():
        return None
    found = Retrieval.load(path)  # a file of something else is refused, not written over
    wanted = about(index, recipe, dataset)
    same = all(
        found.about.get(key) == (list(value) if isinstance(value, tuple) else value) for key, value in wanted.items()
    )
    is_same_data = (found.dataset["sha256"], found.dataset["samples"]) == (dataset.digest, len(dataset.samples))
    return found if same and is_same_data else None


def _tell(found: "Retrieval", path: Path, new: int, is_new: bool, as_json: bool) -> None:
    recalls = {which: recall for which in ("own", "corpus") if (recall := found.recall(which))}
    if as_json:
        told = {which: asdict(recall) for which, recall in recalls.items()}
        record = {"file": str(path), "written": is_new, "samples": len(found.samples), "skipped": len(found.skipped)}
        typer.echo(json.dumps({**record, "indexed": new, "recall": told, **found.about}, indent=1))
        return
    seconds = f" in {found.about['seconds']:.1f} s" if is_new else "; it was there already"
    typer.echo(f"{len(found.samples)} questions, {found.about['passages']} passages ({new} newly indexed){seconds}")
    for which, recall in recalls.items():
        among = "own passages" if which == "own" else "whole corpus"
        typer.echo(
            f"recall@{found.k}, {among}: {recall.recall:.1%} of the needed passages, all of them in "
            f"{recall.complete:.0%} of {recall.samples} labelled samples"
        )
    if not recalls:
        typer.echo("the file does not label the passages that answers need, so there is no recall")
    typer.echo(f"{path}")
