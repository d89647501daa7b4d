"""`kvfoundry eval ragqa`: questions over passages."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvfoundry.cli.evaluation.options import EvalOptions, with_eval_options
from kvfoundry.cli.evaluation.output import note_skipped
from kvfoundry.cli.evaluation.run import run_tasks
from kvfoundry.cli.options import DataOption, SkipDamagedOption


@with_eval_options
def ragqa(
    data: DataOption = None,
    skip_damaged: SkipDamagedOption = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Longest answer in tokens.")] = 16,
    *,
    options: EvalOptions,
) -> None:
    """Questions over retrieved passages: exact match, F1, ROUGE-L and the time to the first token.

    Without --data, our own questions about places, people and machines that do not exist. A file has "question",
    "answers" and "ctxs" with "title" and "text" for each sample; MuSiQue's and HotpotQA's own forms are read too.
    """
    from kvfoundry.evaluate.scores.extra import is_installed
    from kvfoundry.evaluate.tasks.ragqa import RagTask
    from kvfoundry.evaluate.tasks.ragqa_data import OWN_DATA, load_ragqa
    from kvfoundry.feeding import position_limit

    samples = load_ragqa(data or OWN_DATA, skip_damaged)
    note_skipped(samples.path, samples.damaged)
    task = RagTask(samples, max_new_tokens=max_new_tokens, chat=options.chat is True)
    if not is_installed("rouge_score"):
        typer.echo("note: no ROUGE-L without the extra eval; get it with: pip install 'kvfoundry[eval]'", err=True)

    def fitted(model: Any, tokenizer: Any) -> Sequence[RagTask]:
        if not skip_damaged:
            return [task]  # what is too long is refused by name
        shorter, long = task.without_long(tokenizer, position_limit(model))
        note_skipped(samples.path, long, "too long")
        return [shorter]

    run_tasks(fitted, options)
