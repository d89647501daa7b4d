"""Fidelity to the full cache on any text: divergence, agreement and perplexity under teacher forcing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from kvfoundry.evaluate.fidelity import compare, force
from kvfoundry.evaluate.prompts import encode_prompt
from kvfoundry.evaluate.tasks.base import Item, TaskError
from kvfoundry.evaluate.tasks.haystack import generated_sentences
from kvfoundry.evaluate.tasks.records import read_text
from kvfoundry.generation import encode, full_cache_bytes

# What the full cache says is kept for the other methods while it fits into so many bytes, and made again beyond that.
_KEPT_BYTES = 2**30


class _FullLogits:
    """Logits of the full cache by text, on the host."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def of(self, texts: Sequence[str], make: Callable[[], Tensor]) -> list[Tensor]:
        """The logits of each text, from `make` ([batch, rest, vocabulary]) where one of them is not there."""
        if not all(text in self._kept for text in texts):
            made = dict(zip(texts, make().cpu(), strict=True))
            used = sum(logits.nbytes for logits in self._kept.values())
            if used + sum(logits.nbytes for logits in made.values()) <= _KEPT_BYTES:
                self._kept |= {text: logits.clone() for text, logits in made.items()}
            return list(made.values())
        return [self._kept[text] for text in texts]


@dataclass(frozen=True)
class FidelityTask:
    """`count` stretches of a text, each a prefix that a method acts on and `rest` tokens that are then forced.

    Attributes:
        text: a UTF-8 file; None takes generated prose, another for each item.
        prefix, rest: in tokens; `rest` is exact, the prefix a few tokens shorter where a cut joins tokens.
        piece: tokens fed at once; 1 is the form of real decoding, more is faster.

    Raises:
        TaskError: a number out of range.
    """

    text: Path | None = None
    prefix: int = 768
    rest: int = 256
    count: int = 4
    piece: int = 1
    _full: _FullLogits = field(default_factory=_FullLogits, compare=False, repr=False)

    name = "fidelity"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise TaskError(f"{self.count} items leave nothing to measure; give at least 1.")
        if self.prefix < 1 or self.rest < 2 or self.piece < 1:
            raise TaskError(
                f"prefix {self.prefix}, rest {self.rest} and piece {self.piece} are out of range; "
                "give at least 1, 2 and 1 tokens."
            )

    def settings(self) -> dict[str, Any]:
        return {
            "text": None if self.text is None else str(self.text),
            "prefix": self.prefix,
            "rest": self.rest,
            "items": self.count,
            "piece": self.piece,
        }

    def items(self, tokenizer: Any, chat: bool, seed: int) -> list[Item]:
        return [
            Item(
                item=f"P{self.prefix}-R{self.rest}-{number}",
                prompt=text,
                references=(tokenizer.decode(encode_prompt(tokenizer, text, chat=False)[-self.rest :]),),
                max_new_tokens=0,
                chat=False,
                cell={"prefix": self.prefix, "rest": self.rest, "repeat": number},
            )
            for number, text in enumerate(self._stretches(tokenizer, seed))
        ]

    def _stretches(self, tokenizer: Any, seed: int) -> list[str]:
        """Texts of prefix + rest tokens, special ones included, or a few less."""
        if self.text is None:
            return [self._cut(tokenizer, _prose(f"fidelity {seed} {number}", self.prefix + self.rest))[0]
                    for number in range(self.count)]  # fmt: skip
        left = read_text(self.text)
        stretches = []
        for number in range(self.count):
            cut, tokens = self._cut(tokenizer, left) if left.strip() else ("", 0)
            if tokens < 0.9 * (self.prefix + self.rest):
                raise TaskError(
                    f"text {self.text} ends in item {number + 1} of {self.count} of {self.prefix + self.rest} tokens; "
                    "give a longer one, or lower --items, --prefix or --rest."
                )
            stretches.append(cut)
            left = left[len(cut) :]
        return stretches

    def _cut(self, tokenizer: Any, text: str) -> tuple[str, int]:
        """The longest beginning of the text that has the wanted tokens, and how many it has."""
        wanted = self.prefix + self.rest
        # A token has a character at least, and few have more than sixteen.
        head = text[: 16 * wanted]
        spans = tokenizer(head, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        kept = min(wanted, len(spans))
        while True:
            cut = head[: spans[kept - 1][1]]
            tokens = len(encode_prompt(tokenizer, cut, chat=False))
            if tokens <= wanted or kept == 1:
                return cut, tokens
            kept = max(1, kept - (tokens - wanted))

    def measure(
        self, model: Any, tokenizer: Any, method: Any, items: Sequence[Item], prefill_chunk: int | None
    ) -> list[dict[str, Any]]:
        """One result line's fields per item.

        `score` is the agreement on the most likely next token, `prediction` these tokens, each behind the text's own.
        """
        texts = [item.prompt for item in items]
        ids, mask = encode(tokenizer, texts, chat=False)
        force_on = partial(force, model, tokenizer, ids, mask, self.rest, piece=self.piece, prefill_chunk=prefill_chunk)
        full = self._full.of(texts, lambda: force_on(None).logits)
        forced = force_on(method)
        lines = []
        for row in range(len(items)):
            prefix = int(mask[row].sum()) - self.rest
            found = compare(full[row], forced.logits[row], ids[row, -self.rest :])
            lines.append(
                {
                    "prediction": tokenizer.decode(forced.logits[row].argmax(-1).tolist()),
                    "score": found.agreement,
                    "exact": found.agreement == 1.0,
                    "kl": found.kl,
                    "nll": found.nll,
                    "perplexity": math.exp(found.nll),
                    "full_nll": found.full_nll,
                    "full_perplexity": math.exp(found.full_nll),
                    "prompt_tokens": prefix + self.rest,
                    "new_tokens": self.rest,
                    "stored_bytes": forced.stored_bytes // len(items),
                    "peak_bytes": forced.peak_bytes // len(items),
                    "parked_bytes": forced.parked_bytes // len(items),
                    "full_bytes": full_cache_bytes(model, prefix),
                    "kept_rows": forced.kept[row].rows,
                    "kept_share": forced.kept[row].share,
                    "kept_profile": forced.profiles[row],
                    "prefill_share": forced.prefill_share,
                    "ttft_seconds": forced.prefix_seconds,
                    "ms_per_token": 1e3 * (forced.seconds - forced.prefix_seconds) / self.rest,
                    "seconds": forced.seconds,
                    "notes": forced.notes,
                }
            )
        return lines


def _prose(seed: str, tokens: int) -> str:
    """Generated text of at least so many tokens: a sentence has more than four in any tokenizer."""
    return "".join(islice(generated_sentences(seed), tokens // 4 + 8)).strip()
