"""EleutherAI's lm-evaluation-harness over a cache of ours: its model `kvfoundry`.

The harness finds a model once its module is imported; it has no other hook for models of other packages. So either

    kvfoundry lm-eval --model smollm2 --method "snapkv(budget=256)" --tasks hellaswag

or, with the harness' own words for everything,

    python -m kvfoundry.integrations.lm_eval --model kvfoundry --model_args pretrained=smollm2,method=h2o(budget=0.2)

or, in Python, `import kvfoundry.integrations.lm_eval` before `lm_eval.simple_evaluate(model="kvfoundry", ...)`.

Tokens, windows, templates and what ends an answer are the harness': this is its Hugging Face model, except for what
reads and writes the cache.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvfoundry
from kvfoundry.cache import KVCache
from kvfoundry.errors import CacheStateError, DataError, KVFoundryError, MissingExtraError, unknown_name
from kvfoundry.evaluate.fidelity import feed
from kvfoundry.generation import full_cache_bytes, generate_ids, read_prompt
from kvfoundry.method import Method

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils_hf import stop_sequences_criteria
    from tqdm import tqdm
except ImportError as error:
    raise MissingExtraError(
        f"the lm-evaluation-harness cannot be imported ({error}); get it with: pip install 'kvfoundry[lm_eval]'"
    ) from error

# (the texts, token ids of the context, token ids of the continuation), as the harness hands them over.
_Request = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("kvfoundry")
class KVFoundryLM(HFLM):
    """A model under a method, as the harness sees it.

    pretrained: what `kvfoundry.load` takes, or a loaded model, with its `tokenizer`. method, budget: a spec and, for
    one that takes it, its budget. prefill_chunk: read contexts in pieces of so many tokens. piece: tokens of a
    continuation fed at once; 1 is the form of decoding. max_length: in tokens; longer contexts lose their beginning.
    The rest means what it means to `kvfoundry.load` or to the harness' `hf` model.

    A continuation is scored over the compressed cache: the method acts on the context except for its last token, then
    that token and the continuation are fed in decode form. A context of one token, as in perplexity tasks, leaves
    nothing to act on, and a method changes something there only if it also acts in decode.

    Raises KVFoundryError for an argument that does not exist or fit, as `kvfoundry.load` and `Method.parse` do.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel = "smollm2",
        method: str | Method = "fullkv",
        budget: int | float | None = None,
        *,
        tokenizer: Any = None,
        revision: str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        attn_implementation: str = "sdpa",
        prefill_chunk: int | None = None,
        piece: int = 1,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        **unknown: Any,
    ) -> None:
        self._check(unknown, batch_size, piece=piece, prefill_chunk=prefill_chunk, max_length=max_length)
        self.method = Method.parse(method, budget)
        if isinstance(pretrained, str):
            pretrained, tokenizer = kvfoundry.load(
                pretrained,
                device=device or "auto",
                dtype=dtype,
                attn_implementation=attn_implementation,
                revision=revision,
            )
        elif tokenizer is None:
            raise KVFoundryError("a loaded model comes with its tokenizer: give tokenizer=... too.")
        KVCache(pretrained, self.method)  # refuses a method that this model cannot serve
        self.prefill_chunk, self.piece = prefill_chunk, piece
        self._read: list[_Read] = []
        with _quiet_about_loaded_models():
            super().__init__(
                pretrained,
                tokenizer=tokenizer,
                revision=revision,
                batch_size=int(batch_size),
                max_length=max_length,
                add_bos_token=add_bos_token,
                prefix_token_id=prefix_token_id,
            )

    @staticmethod
    def _check(unknown: dict[str, Any], batch_size: int | str, **counts: int | None) -> None:
        if unknown:
            known = [name for name in KVFoundryLM.__init__.__annotations__ if name not in ("unknown", "return")]
            raise KVFoundryError(unknown_name("model argument", next(iter(unknown)), known))
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise KVFoundryError(f"batch_size {batch_size!r} is not a number of prompts; give 1 or more.")
        for name, count in counts.items():
            if count is not None and (not isinstance(count, int) or count < 1):
                raise KVFoundryError(f"{name}={count!r} is not a number of tokens; give 1 or more.")

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> KVFoundryLM:
        """As the harness does it, but a comma inside a method's brackets separates nothing."""
        from lm_eval._cli.utils import key_val_to_dict

        return cls.create_from_arg_obj(key_val_to_dict(arg_string), additional_config)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results: the method, and what its caches held after the prompts."""
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": str(self.model.dtype),
            "model_revision": self.revision,
            "kvfoundry": {"version": kvfoundry.__version__, "method": str(self.method), **self.cost()},
        }

    def cost(self) -> dict[str, Any]:
        """Means over the prompts read so far, in bytes: what the cache stored, and a full cache of the same prompt."""
        if not self._read:
            return {"prompts": 0}
        return {
            "prompts": len(self._read),
            "stored_bytes": sum(read.stored for read in self._read) / len(self._read),
            "full_bytes": sum(read.full for read in self._read) / len(self._read),
            "notes": sorted({note for read in self._read for note in read.notes}),
        }

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[_Request], disable_tqdm: bool = False, override_bs: int | None = None, **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding would say the same) of each request's continuation.

        Requests with the same context share one prefill; each goes on from a fork of its cache.
        """
        same: dict[tuple[int, ...], list[int]] = {}
        for number, (_texts, context, continuation) in enumerate(requests):
            tokens = len(continuation)
            if not 0 < tokens <= self.max_length:
                raise DataError(f"a continuation has {tokens} tokens; the model takes 1 to {self.max_length}.")
            read = (context + continuation)[-(self.max_length + 1) : -tokens]
            same.setdefault(tuple(read), []).append(number)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        progress = tqdm(total=len(requests), disable=disable_tqdm, desc="Scoring continuations")
        for contexts in _batches(list(same), override_bs or self.batch_size):
            for number, answer in self._score(contexts, [same[context] for context in contexts], requests):
                answers[number] = answer
                texts = requests[number][0]
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
                progress.update(1)
        progress.close()
        return answers

    def _score(
        self, contexts: Sequence[Sequence[int]], members: Sequence[Sequence[int]], requests: Sequence[_Request]
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Number and answer of every request, where `members` are the numbers of those that share a context."""
        ids, mask = _padded(contexts, left=True, device=self.device)
        cache = self._opened(ids, mask)
        turns = max(len(group) for group in members)
        for turn in range(turns):
            said, real = _padded(
                [requests[group[turn]][2] if turn < len(group) else [] for group in members], device=self.device
            )
            # Behind the end of a shorter continuation stand tokens that none of its own can see.
            fed = torch.cat([ids, said[:, :-1]], dim=1)
            seen = torch.cat([mask, torch.ones_like(said[:, :-1])], dim=1)
            going_on = cache if turn == turns - 1 else _copy_of(cache)
            scores, best = self._follow(going_on, fed, seen, ids.shape[1] - 1, said)
            sums, greedy = (scores * real).sum(dim=1).tolist(), (best | (real == 0)).all(dim=1).tolist()
            for row, group in enumerate(members):
                if turn < len(group):
                    yield group[turn], (sums[row], greedy[row])

    def _opened(self, ids: Tensor, mask: Tensor) -> KVCache:
        """A cache that has read all but the last token of each context."""
        cache = KVCache(self.model, self.method)
        if ids.shape[1] == 1:
            return cache
        read_prompt(self.model, self.tokenizer, cache, ids[:, :-1], mask[:, :-1], self.prefill_chunk)
        for tokens in (mask.sum(dim=1) - 1).tolist():
            full = full_cache_bytes(self.model, tokens)
            self._read.append(_Read(cache.nbytes // ids.shape[0], full, tuple(cache.notes)))
        return cache

    def _follow(self, cache: KVCache, ids: Tensor, mask: Tensor, start: int, said: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each token `said` [batch, tokens] behind those in front, and whether it is the best."""
        scores, greedy = [], []
        done = 0
        for logits in self._fed(cache, ids, mask, start):
            following = said[:, done : done + logits.shape[1]]
            done += logits.shape[1]
            scores.append(logits.log_softmax(-1).gather(2, following[..., None]).squeeze(2))
            greedy.append(logits.argmax(-1) == following)
        return torch.cat(scores, dim=1), torch.cat(greedy, dim=1)

    def _fed(self, cache: KVCache, ids: Tensor, mask: Tensor, start: int) -> Iterator[Tensor]:
        if start == 0:  # the one token of the context is the prompt
            yield from feed(self.model, cache, ids[:, :1], mask[:, :1], 0)
            start = 1
        yield from feed(self.model, cache, ids, mask, start, self.piece)

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], *, attention_mask: Tensor, **options: Any
    ) -> Tensor:
        """Contexts and answers as token ids, [batch, tokens]; called by the harness' `generate_until`."""
        if not options.get("do_sample"):
            options = {name: value for name, value in options.items() if name != "temperature"} | {"do_sample": False}
        answers = generate_ids(
            self.model,
            self.tokenizer,
            context,
            attention_mask,
            self.method,
            max_length - context.shape[1],
            prefill_chunk=self.prefill_chunk,
            stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, context.shape[1], context.shape[0]),
            **options,
        )
        self._read += [_Read(answer.stored_bytes, answer.full_bytes, tuple(answer.notes)) for answer in answers]
        written, _ = _padded(
            [answer.token_ids for answer in answers], device=self.device, pad=self.tokenizer.pad_token_id
        )
        return torch.cat([context, written], dim=1)


@dataclass(frozen=True)
class _Read:
    """What a cache held after one prompt, in bytes, and what its method says about itself."""

    stored: int
    full: int
    notes: tuple[str, ...]


def _batches(contexts: list[tuple[int, ...]], size: int) -> Iterator[list[tuple[int, ...]]]:
    """Contexts of like length together, the longest first; those of one token, which leave no prompt, by themselves."""
    contexts = sorted(contexts, key=len, reverse=True)
    prompts = sum(len(context) > 1 for context in contexts)
    for alike in (contexts[:prompts], contexts[prompts:]):
        for start in range(0, len(alike), size):
            yield alike[start : start + size]


def _padded(
    rows: Sequence[Sequence[int]], *, device: torch.device, left: bool = False, pad: int = 0
) -> tuple[Tensor, Tensor]:
    """Token ids and mask of rows of unlike length, [rows, longest] each."""
    width = max(len(row) for row in rows)
    ids, mask = [], []
    for row in rows:
        filling = width - len(row)
        front, behind = (filling, 0) if left else (0, filling)
        ids.append([pad] * front + list(row) + [pad] * behind)
        mask.append([0] * front + [1] * len(row) + [0] * behind)
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _copy_of(cache: KVCache) -> KVCache:
    try:
        return cache.fork()
    except CacheStateError:  # recurrent states have no fork
        return copy.deepcopy(cache)


@contextmanager
def _quiet_about_loaded_models() -> Iterator[None]:
    """The harness warns of models that come loaded; ours always do."""
    logger = logging.getLogger("lm_eval.models.huggingface")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
