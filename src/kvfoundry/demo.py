"""The main job on the embedded model: four methods at two budgets against the full cache, and one document asked often.

A thin use of `kvfoundry.evaluate`: everything it does, `kvfoundry eval niah` and `kvfoundry.KVCache.fork` do too.
"""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kvfoundry
from kvfoundry.evaluate.prompts import resolve_chat
from kvfoundry.evaluate.results import write_text
from kvfoundry.evaluate.reuse import ReuseResult, compare_reuse
from kvfoundry.evaluate.runner import Outcome, Progress, evaluate
from kvfoundry.evaluate.tasks.haystack import generated_sentences
from kvfoundry.evaluate.tasks.needles import KINDS
from kvfoundry.evaluate.tasks.niah import FRAME, NeedleTask
from kvfoundry.evaluate.tasks.placement import insert_at_depths

METHODS = ("fullkv", "streamingllm", "snapkv", "h2o", "adakv")
BUDGETS = (128, 512)
LENGTH = 2000
# Words survive eviction that digits do not: both kinds, so that the graded score has something to say.
TASKS = (
    NeedleTask(lengths=(LENGTH,), depths=(20.0, 80.0), kind="word"),
    NeedleTask(lengths=(LENGTH,), depths=(20.0, 80.0), kind="digits"),
)


@dataclass(frozen=True)
class DemoResult:
    outcome: Outcome
    reuse: list[ReuseResult]


def document_questions(tokenizer: Any, tokens: int, seed: int) -> tuple[list[str], list[tuple[str, ...]]]:
    """Prompts about one generated document of about `tokens` tokens, each asking for another fact; and the answers.

    One fact of each needle kind: several of one kind would measure how well a small model tells them apart.
    """
    rng = random.Random(f"document {seed}")
    facts = [kind.draw(rng, 1, is_taken=lambda word: False) for kind in KINDS.values()]
    sentences: list[str] = []
    sizes: list[int] = []
    for sentence in generated_sentences(f"document {seed}"):
        if sum(sizes) >= tokens:
            break
        sentences.append(sentence)
        sizes.append(len(tokenizer(sentence, add_special_tokens=False)["input_ids"]))
    depths = [100 * number / (len(facts) + 1) for number in range(1, len(facts) + 1)]
    placed = [(depth, fact.sentences[0]) for depth, fact in zip(depths, facts, strict=True)]
    context = insert_at_depths(sentences, sizes, placed)
    return [FRAME.format(context=context, question=fact.question) for fact in facts], [fact.answers for fact in facts]


def run_demo(
    model: Any,
    tokenizer: Any,
    out: Path,
    *,
    seed: int = 0,
    name: str | None = None,
    tasks: tuple[NeedleTask, ...] = TASKS,
    document_tokens: int = 1500,
    on_progress: Callable[[Progress], None] | None = None,
) -> DemoResult:
    """Run both parts and write the results folder `out`; the second part goes to `reuse.json` there.

    name: of the model, for the report.
    """
    outcome = evaluate(
        model, tokenizer, tasks, METHODS, out=out, budgets=BUDGETS, seed=seed, arguments={"model": name},
        on_progress=on_progress,
    )  # fmt: skip
    chat = resolve_chat(tokenizer, None)
    prompts, answers = document_questions(tokenizer, document_tokens, seed)
    method = kvfoundry.Method.parse("fullkv")
    reuse = [compare_reuse(model, tokenizer, method, prompts, answers, chat=chat)]
    write_text(out / "reuse.json", json.dumps([asdict(result) for result in reuse], indent=1) + "\n")
    return DemoResult(outcome, reuse)
