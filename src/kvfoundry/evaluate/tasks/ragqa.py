"""Questions over a handful of passages: exact match, F1 and ROUGE-L of a short answer, and the time to its start.

The prompt is plain text that begins with a worked example, even for a chat model: a small model then answers with a
few words and not with a sentence.
"""

from dataclasses import dataclass, replace
from typing import Any

from kvfoundry.evaluate.prompts import encode_item
from kvfoundry.evaluate.scores.answers import answer_f1, as_question, exact_match
from kvfoundry.evaluate.scores.extra import is_installed
from kvfoundry.evaluate.scores.longbench import first_line
from kvfoundry.evaluate.scores.rouge import rouge_l
from kvfoundry.evaluate.tasks.base import Item, TaskError
from kvfoundry.evaluate.tasks.ragqa_data import OWN_DATA, Passage, RagData, RagSample

# Goes into every record; a change of the wording makes a new version.
PROMPT = "kvfoundry-1"

EXAMPLE = """\
The grey tern: The grey tern is a small bird of the northern islands. It builds its nest of seaweed and lays two eggs \
in May. The bird was first described by the priest Oluf Rand, who kept a diary of the weather.

Question: of what does the grey tern build its nest?
Answer: seaweed

Question: how many eggs does the grey tern lay?
Answer: two

Question: who first described the grey tern?
Answer: Oluf Rand

"""


@dataclass(frozen=True)
class RagTask:
    """The samples of one file.

    Attributes:
        chat: put the prompt into the chat template where the run uses one.
    """

    data: RagData
    max_new_tokens: int = 16
    chat: bool = False

    name = "ragqa"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise TaskError(f"new tokens ({self.max_new_tokens}) must be at least 1.")

    def settings(self) -> dict[str, Any]:
        return {
            "data": "kvfoundry" if self.data.path == OWN_DATA else str(self.data.path),
            "data_sha256": self.data.digest,
            "samples": len(self.data.samples),
            "damaged": len(self.data.damaged),
            "prompt": PROMPT,
            "max_new_tokens": self.max_new_tokens,
            "chat": self.chat,
            "rouge_l": is_installed("rouge_score"),
        }

    def items(self, tokenizer: Any, chat: bool, seed: int) -> list[Item]:
        return [self._item(sample) for sample in self.data.samples]

    def _item(self, sample: RagSample) -> Item:
        question = f"\n\nQuestion: {as_question(sample.question)}\nAnswer:"
        hops = {} if sample.hops is None else {"hops": sample.hops}
        return Item(
            item=sample.item,
            prompt=EXAMPLE + "\n\n".join(map(_written, sample.passages)) + question,
            references=sample.answers,
            max_new_tokens=self.max_new_tokens,
            question=question,
            chat=None if self.chat else False,
            line_ends=True,
            cell={"passages": len(sample.passages), **hops},
        )

    def score(self, item: Item, prediction: str) -> tuple[float, bool]:
        """F1 and exact match of the first line, of the best answer each."""
        return (
            max(answer_f1(prediction, answer) for answer in item.references),
            any(exact_match(prediction, answer) for answer in item.references),
        )

    def more_scores(self, item: Item, prediction: str) -> dict[str, float]:
        """The score by its name, and ROUGE-L of the first line where the extra `eval` is installed."""
        f1, exact = self.score(item, prediction)
        more = {}
        if is_installed("rouge_score"):
            more["rouge_l"] = max(rouge_l(first_line(prediction), answer) for answer in item.references)
        return {"f1": f1, "exact_match": float(exact), **more}

    def without_long(self, tokenizer: Any, positions: int | None) -> tuple["RagTask", tuple[str, ...]]:
        """The task without the samples that the model has no room for, and a sentence for each of these."""
        kept, left_out = [], []
        for sample, item in zip(self.data.samples, self.items(tokenizer, self.chat, 0), strict=True):
            tokens = len(encode_item(tokenizer, item, self.chat))
            if positions is not None and tokens + self.max_new_tokens > positions:
                left_out.append(f"sample {sample.item} has {tokens} tokens")
            else:
                kept.append(sample)
        if not kept:
            raise TaskError(f"no sample of {self.data.path} fits the model's {positions} positions.")
        return replace(self, data=replace(self.data, samples=tuple(kept))), tuple(left_out)


def _written(passage: Passage) -> str:
    return f"{passage.title}: {passage.text}" if passage.title else passage.text
