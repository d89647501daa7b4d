"""`kvfoundry rag decode`: answers, while passages come and go."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfoundry.cli.options import DeviceOption, DtypeOption, Interrupted, JsonOption, ModelOption
from kvfoundry.cli.rag.progress import progress_bar
from kvfoundry.errors import SpecError

if TYPE_CHECKING:
    from kvfoundry.rag.trace_file import TraceFile

_UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0}


def parse_seconds(text: str) -> float:
    """ "50ms" -> 0.05; a bare number is seconds. SpecError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|)\s*", text)
    if found is None:
        raise SpecError(f"--transfer-delay is a time such as 50ms or 0.2s, got {text!r}.")
    return float(found[1]) * _UNITS[found[2]]


def decode(
    kv: Annotated[Path, typer.Option("--kv", help="File of kvfoundry rag build.")],
    retrieval: Annotated[Path, typer.Option("--retrieval", help="File of kvfoundry rag retrieve.")],
    data: Annotated[
        Path | None, typer.Option("--data", help="The file of questions that both were made for. (default: our own)")
    ] = None,
    load_cache_dir: Annotated[
        Path | None, typer.Option("--load-cache-dir", help="Folder of chunks. (default: where they were built)")
    ] = None,
    policy: Annotated[
        str, typer.Option("--policy", help="summary, attention_mass, bandit, retrieval_rank, oracle or none.")
    ] = "bandit",
    device_size: Annotated[
        str | None, typer.Option("--device-size", help="Room for passages. (default: as they were built for)")
    ] = None,
    ahead: Annotated[int, typer.Option("--ahead", help="Transfers at a time.")] = 1,
    horizon: Annotated[int, typer.Option("--horizon", help="Calls between a prediction and its use.")] = 4,
    margin: Annotated[float, typer.Option("--margin", help="By how much a newcomer must be worth more.")] = 0.1,
    wait: Annotated[
        bool, typer.Option("--wait", help="Let a call wait for what was predicted --horizon calls before.")
    ] = False,
    transfer_delay: Annotated[
        str, typer.Option("--transfer-delay", help="Make every transfer take so long more, such as 50ms.")
    ] = "0s",
    speculate: Annotated[
        int, typer.Option("--speculate", min=0, help="Draft so many tokens over what is resident, verify over all.")
    ] = 0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Read each answer once more over all passages, to measure absent ones.")
    ] = False,
    piece: Annotated[int, typer.Option("--question-piece", help="Tokens of the question that are read in a call.")] = 8,
    new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Longest answer.")] = 16,
    store_size: Annotated[str, typer.Option("--store-size", help="What the folder may hold.")] = "64GiB",
    model: ModelOption = "smollm2",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    out: Annotated[Path, typer.Option("--out", help="Folder for the trace.")] = Path("results/decoding"),
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first so many samples.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the trace that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Answer every sample, and bring absent passages before they matter: speculative_trace.json.

    Bad samples are named and left out; an interrupted run goes on with --resume.
    """
    from kvfoundry.cli.options import load_model
    from kvfoundry.evaluate.tasks.ragqa_data import OWN_DATA
    from kvfoundry.method import Method
    from kvfoundry.rag.answering import answer_all, require_same
    from kvfoundry.rag.dataset import load_dataset
    from kvfoundry.rag.decode import Decoder, Settings, check_placeholders
    from kvfoundry.rag.kv_file import KvFile
    from kvfoundry.rag.making import Maker
    from kvfoundry.rag.opening import open_store
    from kvfoundry.rag.policies import policy as named_policy
    from kvfoundry.rag.prompts import lay_out_all
    from kvfoundry.rag.retrieval_file import Retrieval
    from kvfoundry.rag.room import Room
    from kvfoundry.rag.speculative import Speculator
    from kvfoundry.rag.trace_file import TraceFile

    made, found = KvFile.load(kv), Retrieval.load(retrieval)
    built = made.settings
    settings = Settings(
        named_policy(policy), Room.parse(device_size or built["room"]), ahead, horizon, margin, wait,
        parse_seconds(transfer_delay), piece, new_tokens, measure,
    )  # fmt: skip
    dataset = load_dataset(data or OWN_DATA)
    require_same(made, kv, [], dataset.digest)
    found.passages(dataset)
    folder = load_cache_dir or Path(built["store"])
    with open_store(folder, store_size, exists=True) as store:
        loaded, tokenizer = load_model(model, device, dtype)
        maker = Maker(loaded, tokenizer, store, Method.parse(built["method"]), folder, built["summary"], built["page"])
        made.require_model(maker.identity, kv)
        check_placeholders(loaded, built["placeholders"])
        prompts, skipped = lay_out_all(
            tokenizer, loaded, dataset, found, top=built["top"], new_tokens=new_tokens, limit=limit,
            which=built["from"], behind=built["behind"],
        )  # fmt: skip
        require_same(made, kv, prompts, dataset.digest)
        arguments = {
            "kv": made.dataset["name"], "model": made.model, "data_sha256": dataset.digest, "built": dict(built),
            "policy": policy, "room": str(settings.room), "ahead": ahead, "horizon": horizon, "margin": margin,
            "wait": wait, "transfer_delay": settings.delay, "speculate": speculate, "measure": measure,
            "question_piece": piece, "max_new_tokens": new_tokens,
        }  # fmt: skip
        decoder = Speculator(maker, settings, speculate) if speculate else Decoder(maker, settings)
        try:
            with TraceFile(out, arguments, resume=resume) as trace, progress_bar(not as_json) as on_progress:
                trace.skipped += skipped
                answer_all(decoder, prompts, trace, on_progress=on_progress)
        except KeyboardInterrupt as error:
            words = [word for word in sys.argv[1:] if word != "--resume"]
            again = shlex.join(["kvfoundry", *words, "--resume"])
            raise Interrupted(f"interrupted; answers so far are in {out}. Go on with: {again}") from error
    _tell(trace, as_json)


def _tell(trace: "TraceFile", as_json: bool) -> None:
    totals: dict[str, Any] = trace.totals
    if as_json:
        typer.echo(json.dumps({"file": str(trace.path), "skipped": trace.skipped, **totals}, indent=1))
        return
    for line in trace.skipped[:3]:
        typer.echo(f"note: sample left out: {line}", err=True)
    if not totals["samples"]:
        typer.echo(f"no sample was answered; {trace.path} says why")
        return
    typer.echo(
        f"{totals['samples']} answers, F1 {100 * totals['f1']:.1f}; first token after "
        f"{totals['first_token_seconds']:.2f} s, {1000 * totals['stall_seconds']:.0f} ms of it and of the rest waited"
    )
    typer.echo(
        f"{totals['promotions']} passages came in mid-answer, of {totals['predictions']} that were predicted; "
        f"{totals['wrong_guesses']} for nothing"
    )
    if totals["resident_share"] is not None:
        typer.echo(
            f"resident: {totals['resident_share']:.1%} of the attention for passages; the one with most of it in "
            f"{totals['hit_rate']:.0%} of calls"
        )
    typer.echo(f"{trace.path}")
