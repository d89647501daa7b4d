"""LongBench: one task per data set, each with its own prompt, generation length, cut and metric.

Source: Bai et al., LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding, arXiv 2308.14508.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvfoundry.evaluate.prompts import cut_middle, fit
from kvfoundry.evaluate.scores.extra import require
from kvfoundry.evaluate.scores.longbench import NEEDED, bucket_of, score
from kvfoundry.evaluate.tasks.base import Item, TaskError
from kvfoundry.evaluate.tasks.longbench_data import LongData, LongSample
from kvfoundry.evaluate.tasks.longbench_prompts import Prompts
from kvfoundry.evaluate.tasks.longbench_sets import DataSet


def require_scores(data_set: DataSet) -> None:
    """Refuse early what would stop at the first answer.

    Raises:
        MissingExtraError: the metric needs a library that is not installed.
    """
    for module in NEEDED.get(data_set.metric, ()):
        require(module, f"the score of {data_set.name}")


@dataclass(frozen=True)
class LongBenchTask:
    """One data set.

    Attributes:
        data: its samples, see `load_data`.
        e: the samples are those of LongBench-E.
        max_length: prompt tokens that the published rule allows: a longer prompt loses its middle, and the chat
            template comes on top. None cuts so that prompt, template and answer fit `positions`.
        positions: what the model was made for; None where it has no such limit.

    Raises:
        TaskError: a length that leaves nothing of a prompt.
        MissingExtraError: the metric needs a library that is not installed.
    """

    data_set: DataSet
    data: LongData
    prompts: Prompts
    e: bool = False
    max_length: int | None = None
    positions: int | None = None

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise TaskError(f"max length {self.max_length} is out of range; give at least 2 tokens.")
        require_scores(self.data_set)

    @property
    def name(self) -> str:
        return f"longbench_{self.data_set.name}{'_e' if self.e else ''}"

    def settings(self) -> dict[str, Any]:
        return {
            "data": str(self.data.path),
            "data_sha256": self.data.digest,
            "samples": len(self.data.samples),
            "damaged": len(self.data.damaged),
            "prompts": self.prompts.source,
            "prompt_sha256": self.prompts.digest(self.data_set),
            "published_prompt": self.prompts.is_published(self.data_set),
            "metric": self.data_set.metric,
            "max_new_tokens": self.data_set.max_new_tokens,
            "max_length": self.max_length,
        }

    def items(self, tokenizer: Any, chat: bool, seed: int) -> Sequence[Item]:
        """One item per sample; a long prompt is cut when its item is looked at, so that a few of many cost little."""
        return _Items(self, tokenizer, chat and self.data_set.chat)

    def item(self, sample: LongSample, tokenizer: Any, chat: bool) -> Item:
        """The question of one sample; chat: its prompt goes into the template."""
        whole = self.prompts.fill(self.data_set, sample.context, sample.given)
        if self.max_length is not None:
            prompt = cut_middle(tokenizer, whole, self.max_length)
        elif self.positions is not None:
            prompt = fit(tokenizer, whole, chat, self.positions - self.data_set.max_new_tokens)
        else:
            prompt = whole
        return Item(
            item=sample.item,
            prompt=prompt,
            references=sample.answers,
            max_new_tokens=self.data_set.max_new_tokens,
            chat=None if self.data_set.chat else False,
            line_ends=self.data_set.line_ends,
            notes=(self.prompts.note(self.data_set),),
            question=_shared_end(prompt, self.prompts.after_context(self.data_set, sample.given)),
            cell={"length": sample.length, "bucket": bucket_of(sample.length), "cut": prompt != whole},
        )

    @cached_property
    def _classes(self) -> dict[str, tuple[str, ...]]:
        return {sample.item: sample.all_classes for sample in self.data.samples}

    def score(self, item: Item, prediction: str) -> tuple[float, bool]:
        value = score(
            self.data_set.metric,
            prediction,
            item.references,
            all_classes=self._classes[item.item],
            first_line_only=self.data_set.first_line,
        )
        return value, value == 1.0


class _Items(Sequence[Item]):
    """The items of a task, each built when it is asked for."""

    def __init__(self, task: LongBenchTask, tokenizer: Any, chat: bool):
        self._task, self._tokenizer, self._chat = task, tokenizer, chat

    def __len__(self) -> int:
        return len(self._task.data.samples)

    def __getitem__(self, place: Any) -> Any:
        found = self._task.data.samples[place]
        if isinstance(place, slice):
            return [self._task.item(sample, self._tokenizer, self._chat) for sample in found]
        return self._task.item(found, self._tokenizer, self._chat)


def _shared_end(first: str, second: str) -> str:
    """The longest text that both end with: a cut may have taken the beginning of a long question."""
    same = 0
    for left, right in zip(reversed(first), reversed(second), strict=False):
        if left != right:
            break
        same += 1
    return first[len(first) - same :]
