"""A prompt cut into segments that are tokenized one by one, so that the ids that are looked up are those that are read.

    head       special tokens that the tokenizer puts in front (one BOS, say), the chat template's opening, instructions
    passage    one per document, with the separator at its end: that is where a separator belongs, at every seam
    question   what follows the last passage, with what the chat template puts behind it

No segment depends on its neighbours, so a passage has the same ids wherever it stands. The prompt is their ids one
behind the other; nothing is tokenized across a seam, nothing is rounded to a grid, and no length is too short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvfoundry.errors import DataError
from kvfoundry.feeding import with_answer_begun

SEPARATOR = "\n\n"
# Stands for the user's text when a chat template is asked what it puts around it.
_MARKER = "kvfoundry0marker"


@dataclass(frozen=True)
class Segments:
    """Token ids of one prompt by segment; `head` may be empty, and `question` where none is known yet."""

    head: tuple[int, ...]
    passages: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]

    @property
    def ids(self) -> list[int]:
        """The whole prompt."""
        return [*self.head, *(token for passage in self.passages for token in passage), *self.question]


def segment(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    question: str = "",
    *,
    head: str = "",
    separator: str = SEPARATOR,
    chat: bool = False,
    answer_prefix: str = "",
) -> Segments:
    """Cut a prompt into segments and tokenize each.

    head: text in front of the documents (instructions, a worked example). chat: all of it is a user turn of the
    tokenizer's chat template. answer_prefix: how the answer begins; part of the question's segment.
    Raises DataError for no documents, an empty one, or a missing chat template.
    """
    if isinstance(documents, str) or not documents:
        raise DataError("documents is empty; give a list of at least one text.")
    for number, document in enumerate(documents):
        if not isinstance(document, str) or not document.strip():
            raise DataError(f"document {number} is empty; leave it out, or give it some text.")
    before, after = _template(tokenizer) if chat else ("", "")
    front = [] if chat else front_ids(tokenizer)
    opening = [*front, *_plain(tokenizer, before + head)]
    asked = with_answer_begun(question + after, answer_prefix)
    passages = tuple(tuple(_without(front, _plain(tokenizer, document + separator))) for document in documents)
    return Segments(tuple(opening), passages, tuple(_without(front, _plain(tokenizer, asked))))


def front_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that the tokenizer puts in front of a text by itself, a BOS for example; often none."""
    plain, full = _plain(tokenizer, "a"), list(tokenizer("a")["input_ids"])
    for at in range(len(full) - len(plain) + 1):
        if full[at : at + len(plain)] == plain:
            return full[:at]
    return []


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _without(front: list[int], ids: list[int]) -> list[int]:
    """The ids of a segment without a beginning that belongs to the prompt's start alone.

    Some tokenizers add it whatever they are told, and a text may spell it out.
    """
    return ids[len(front) :] if front and ids[: len(front)] == front and len(ids) > len(front) else ids


def _template(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the chat template puts in front of a user's text and behind it, up to where the answer begins."""
    if not tokenizer.chat_template:
        raise DataError("chat=True, but the tokenizer has no chat template; use chat=False.")
    turn = [{"role": "user", "content": _MARKER}]
    rendered = str(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))
    before, _, after = rendered.partition(_MARKER)
    return before, after
