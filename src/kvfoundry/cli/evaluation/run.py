"""Tasks under the shared options: refuse early, load the model, show progress, finish."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfoundry.cli.evaluation.options import EvalOptions
from kvfoundry.cli.evaluation.output import finish, progress_bar
from kvfoundry.cli.evaluation.playground import specs
from kvfoundry.cli.options import Interrupted, parse_budgets

if TYPE_CHECKING:
    from kvfoundry.evaluate.results import Line
    from kvfoundry.evaluate.tasks.base import MeasuredTask, Task


def run_tasks(
    tasks: "Sequence[Task | MeasuredTask] | Callable[[Any, Any], Sequence[Task]]",
    options: EvalOptions,
    draw: "Callable[[Sequence[Line]], Path | None] | None" = None,
) -> None:
    """Ask every item of the tasks under every method, print the table and leave the results folder.

    tasks: the tasks, or what makes them for the loaded model and its tokenizer. draw: makes a picture of the lines of
    the results and returns its path.

    Raises:
        KVFoundryError: whatever can be known before the first prompt; the cheapest to know comes first.
        Interrupted: Ctrl-C; the message says how to go on.
    """
    budgets = parse_budgets(options.budgets(options.budget))
    from kvfoundry.evaluate.arms import expand_arms
    from kvfoundry.evaluate.executors import ModelSource, worker_executor
    from kvfoundry.evaluate.results import RESULTS, check_folder, read_lines
    from kvfoundry.evaluate.runner import evaluate
    from kvfoundry.models import outline

    arms = expand_arms(specs(options.method, options), budgets)
    check_folder(options.out, options.resume)  # before the model is loaded: a wrong folder is known at once
    attention = {} if options.attn_implementation is None else {"attn_implementation": options.attn_implementation}
    source = ModelSource(options.model, options.device, options.dtype, **attention)
    executor = worker_executor(options.workers, options.worker_count, source)
    # Workers load it themselves; here its config is all that is needed then.
    model, tokenizer = source.load() if executor is None else outline(options.model)
    try:
        with progress_bar(shown=not options.as_json) as on_progress:
            outcome = evaluate(
                model,
                tokenizer,
                tasks(model, tokenizer) if callable(tasks) else tasks,
                arms,
                out=options.out,
                seed=options.seed,
                limit=options.limit,
                batch_size=options.batch_size,
                chat=options.chat,
                prefill_chunk=options.prefill_chunk,
                hide_question=options.hide_question,
                together=options.together,
                timed=options.timed,
                resume=options.resume,
                executor=executor,
                arguments={
                    "model": options.model,
                    "device": options.device,
                    "dtype": options.dtype,
                    "workers": options.workers,
                    "worker_count": options.worker_count,
                    **attention,
                },
                on_progress=on_progress,
            )
    except KeyboardInterrupt as error:
        hint = _resume_hint(options.out)
        raise Interrupted(f"interrupted; finished items are kept. Go on with: {hint}") from error
    finish(outcome, options.as_json, picture=draw(read_lines(options.out / RESULTS)) if draw else None)


def _resume_hint(out: Path) -> str:
    command = ["kvfoundry", *sys.argv[1:]]
    if not any(word.partition("=")[0] in ("--out", "--save_dir") for word in command):
        command += ["--out", str(out)]
    return shlex.join(command if "--resume" in command else [*command, "--resume"])
