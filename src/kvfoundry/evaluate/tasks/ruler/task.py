"""One of the thirteen tasks at some lengths, as items whose prompts fill the length."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from kvfoundry.errors import unknown_name
from kvfoundry.evaluate.prompts import encode_prompt
from kvfoundry.evaluate.tasks.base import Item, TaskError
from kvfoundry.evaluate.tasks.haystack import folder_sentences, generated_sentences
from kvfoundry.evaluate.tasks.ruler import counting, niah, qa, variables
from kvfoundry.evaluate.tasks.ruler.base import Draft, Setting
from kvfoundry.evaluate.tasks.ruler.filler import Essay
from kvfoundry.evaluate.tasks.ruler.fit import largest_fitting
from kvfoundry.evaluate.tasks.ruler.qa_data import QAData
from kvfoundry.evaluate.tasks.ruler.scoring import METRICS
from kvfoundry.evaluate.tasks.ruler.table import VARIANTS, QASpec


@dataclass(frozen=True)
class RulerTask:
    """`items_per_length` items of a variant at each length.

    A length is that of prompt and answer together, as published: the prompt, chat template and beginning of the answer
    included, has at most the length less the variant's answer tokens, and one unit of filler more would not fit.

    Attributes:
        variant: a name of `table.VARIANTS`.
        haystack: folder of texts for the variants that hide facts in an essay; None takes generated prose.
        answer_prefix: whether the answer is begun for the model.
        qa: the questions of qa_1 and qa_2.

    Raises:
        TaskError: an unknown variant, a length or number out of range, or questions that are missing or of the wrong
            style.
    """

    variant: str
    lengths: tuple[int, ...] = (1024,)
    items_per_length: int = 5
    haystack: Path | None = None
    answer_prefix: bool = True
    qa: QAData | None = None

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise TaskError(unknown_name("RULER task", self.variant, VARIANTS))
        if not self.lengths:
            raise TaskError("no length given; name at least one with --lengths.")
        if len(set(self.lengths)) != len(self.lengths):
            raise TaskError(f"a length is given twice: {', '.join(map(str, self.lengths))}.")
        for length in self.lengths:
            if length < 1:
                raise TaskError(f"length {length} is out of range; a length is prompt and answer in tokens.")
        if self.items_per_length < 1:
            raise TaskError(f"{self.items_per_length} items leave nothing to ask; give at least 1.")
        spec = VARIANTS[self.variant].spec
        if isinstance(spec, QASpec) and (self.qa is None or self.qa.style != spec.style):
            kind = {"squad": "SQuAD", "hotpot": "HotpotQA"}[spec.style]
            raise TaskError(f"{self.variant} needs a local {kind}-style JSON file; name it with --qa-data.")

    @property
    def name(self) -> str:
        return f"ruler_{self.variant}"

    def settings(self) -> dict[str, Any]:
        return {
            "lengths": list(self.lengths),
            "items": self.items_per_length,
            "haystack": None if self.haystack is None else str(self.haystack),
            "answer_prefix": self.answer_prefix,
            "qa_data": None if self.qa is None else str(self.qa.path),
            "skipped_records": None if self.qa is None else len(self.qa.skipped),
        }

    def items(self, tokenizer: Any, chat: bool, seed: int) -> list[Item]:
        builder = _Builder(self, tokenizer, chat, seed)
        of_length = [builder.items(length) for length in self.lengths]
        return [next(items) for _ in range(self.items_per_length) for items in of_length]

    def score(self, item: Item, prediction: str) -> tuple[float, bool]:
        score = METRICS[VARIANTS[self.variant].metric](item.references, prediction)
        return score, score == 1.0


class _Builder:
    """Makes the items of one task for one tokenizer and seed."""

    def __init__(self, task: RulerTask, tokenizer: Any, chat: bool, seed: int) -> None:
        self._task, self._tokenizer, self._chat, self._seed = task, tokenizer, chat, seed
        # The same text for every item, as published: what differs is what is hidden in it.
        folder = task.haystack
        self._essay = Essay(generated_sentences(f"ruler {seed}") if folder is None else folder_sentences(folder))

    def items(self, length: int) -> Iterator[Item]:
        """Items of one length, without end but for the questions of a file, which are asked once each.

        Raises:
            TaskError: the length is too short, or something to fill it with runs out.
        """
        answer_tokens = VARIANTS[self._task.variant].answer_tokens
        room = length - answer_tokens
        size: int | None = None
        made = 0
        for draft in self._drafts(length):
            prefix = draft.answer_prefix if self._task.answer_prefix else ""
            tokens_of = partial(self._tokens, draft, prefix)
            filler = draft.filler
            size = largest_fitting(tokens_of, room, filler.smallest, filler.most, size)
            if size is None:
                if self._task.qa is not None:  # another question may have shorter documents
                    continue
                raise TaskError(
                    f"length {length} is too short for {self._task.variant}: its shortest prompt takes "
                    f"{tokens_of(filler.smallest)} tokens and the answer {answer_tokens}; raise --lengths."
                )
            if size == filler.most and tokens_of(size) < 0.95 * room:
                raise TaskError(
                    f"length {length} is too long for {self._task.variant}: there are no more than {size} "
                    f"{filler.unit} to fill it with; lower --lengths or give more text."
                )
            yield Item(
                item=f"L{length}-{made}",
                prompt=draft.prompt(size),
                references=draft.references,
                max_new_tokens=answer_tokens,
                question=draft.question,
                answer_prefix=prefix,
                cell={"length": length, "repeat": made},
            )
            made += 1
        raise TaskError(
            f"{self._task.variant} has {made} questions at length {length}, {self._task.items_per_length} are asked "
            "for; lower --items, raise --lengths or give a larger file with --qa-data."
        )

    def _tokens(self, draft: Draft, prefix: str, size: int) -> int:
        return len(encode_prompt(self._tokenizer, draft.prompt(size), self._chat, prefix))

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _setting(self, length: int, number: int) -> Setting:
        return Setting(f"{self._task.variant} {self._seed} {length} {number}", length, self._count)

    def _drafts(self, length: int) -> Iterator[Draft]:
        spec = VARIANTS[self._task.variant].spec
        if isinstance(spec, QASpec):
            data = self._task.qa
            if data is not None:
                order = Random(f"{self._task.variant} {self._seed}").sample(data.questions, len(data.questions))
                for number, question in enumerate(order):
                    yield qa.draft(question, data, self._setting(length, number))
            return
        for number in count():
            setting = self._setting(length, number)
            if isinstance(spec, niah.NeedleSpec):
                yield niah.draft(spec, setting, self._essay)
            elif isinstance(spec, variables.ChainSpec):
                yield variables.draft(spec, setting)
            elif isinstance(spec, counting.CommonSpec):
                yield counting.common_words(spec, setting)
            else:
                yield counting.coded_words(spec, setting)
