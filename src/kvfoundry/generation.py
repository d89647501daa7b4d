"""Text from a model under a method: batches, chunked prompts, transformers' own decoding, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from kvfoundry import compat
from kvfoundry.cache import KVCache
from kvfoundry.devices import input_device
from kvfoundry.engine import DecodeEngine
from kvfoundry.engine.choosing import Choice
from kvfoundry.errors import DataError
from kvfoundry.feeding import check_length, feed, with_answer_begun
from kvfoundry.kept import Kept, kept_by_row
from kvfoundry.method import Method
from kvfoundry.reconstruction import compress_by_reconstruction

if TYPE_CHECKING:
    from kvfoundry.blend import Blend
    from kvfoundry.chunks import ChunkStore


@dataclass(frozen=True)
class Generation:
    """One answer and its cost.

    stored_bytes, peak_bytes: the cache's bytes after the prompt and at their largest, parked_bytes: what a parking
    method holds in host memory besides, each divided by the rows of the batch; full_bytes: those of a full 16- or
    32-bit cache of the same prompt. kept_rows, kept_share, kept_profile: the rows of this prompt that were held when
    it ended, see `kvfoundry.kept.Kept`. Times are of the whole batch:
    ttft_seconds until the first token (and the second pass of a method that has one), ms_per_token per decode step
    after it (0 when there was none). reused_tokens, recomputed_tokens: of documents whose chunks were in the store, and
    of the context that a blend computed again. store_report: hits by tier, reasons of misses, bytes and stalls of the
    batch, see `kvfoundry.chunks.report.Report`. prefill_share: attention of the batch's prompts that was computed, see
    `KVCache.prefill_share`.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    new_tokens: int
    stored_bytes: int
    peak_bytes: int
    full_bytes: int
    kept_rows: float
    kept_share: float
    kept_profile: str | None
    ttft_seconds: float | None
    ms_per_token: float | None
    seconds: float
    notes: list[str]
    parked_bytes: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    store_report: dict[str, Any] | None = None
    prefill_share: float | None = None


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | list[str],
    method: str | Method | None = None,
    max_new_tokens: int = 64,
    *,
    chat: bool = False,
    answer_prefix: str | list[str] = "",
    batch_size: int | None = None,
    prefill_chunk: int | None = None,
    hold_back: int = 0,
    streamer: Any = None,
    generation_config: GenerationConfig | None = None,
    seed: int | None = None,
    cache: KVCache | None = None,
    documents: Sequence[str] | Sequence[Sequence[str]] | None = None,
    store: ChunkStore | None = None,
    blend: str | Blend = "blend()",
    chunk_method: str | Method | None = None,
    head: str = "",
    namespace: str = "",
    engine: DecodeEngine | bool | None = None,
    require_kernels: bool = False,
    compile: bool = False,
    details: bool = False,
    **options: Any,
) -> Any:
    """Answer one prompt or many under a method; the same text as `model.generate` with the same cache.

    prompts: a string, or a list answered in batches of `batch_size` (all at once by default), left-padded. chat: wrap
    each prompt as a user turn of the tokenizer's chat template. answer_prefix: how the answer begins, for all prompts
    or one for each; the model goes on from there, and what is returned does not repeat it. prefill_chunk: feed the
    prompt in pieces of so many tokens; methods evict after each piece, so the peak stays below the full cache.
    hold_back: the method acts before it sees the last so many tokens of a prompt (its question, say), which then add
    their own rows. cache: continue on this cache (a fork() of a document's cache, say); prompts are then the text that
    follows. documents: texts in front of the prompts, one list for all or one for each; their chunks are looked up in
    `store` and blended as `blend` says, see `kvfoundry.blend.blended_cache`, also for chunk_method, head, namespace.
    engine: True decodes answers by a `DecodeEngine` (static rows, a CUDA graph where there is a GPU), and by
    transformers' loop where it cannot serve method, model or options (`notes` say why). None does so where a GPU and
    Triton are there, without a note; False never does. An engine of your own keeps its graph from call to call.
    require_kernels: an error instead of the loop. compile: the engine's model goes through torch.compile.
    streamer, generation_config, seed and further keywords (do_sample, num_beams, stop_strings, ...) are transformers'.
    Returns a string or a list of strings in the order of the prompts; with details=True `Generation` objects.
    Raises DataError for an empty prompt or one that does not fit the model.
    """
    method = cache.method if cache is not None else Method.parse("fullkv" if method is None else method)
    single = isinstance(prompts, str)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    prefixes = [answer_prefix] * len(texts) if isinstance(answer_prefix, str) else list(answer_prefix)
    if len(prefixes) != len(texts):
        raise DataError(f"{len(prefixes)} answer prefixes for {len(texts)} prompts; give one, or one for each prompt.")
    if seed is not None:
        set_seed(seed)
    if cache is not None and len(texts) != 1:
        raise DataError("cache=... continues one sequence; give one prompt, and fork() the cache for each question.")
    if prefill_chunk is not None and prefill_chunk < 1:
        raise DataError(f"prefill_chunk={prefill_chunk} must be at least 1 token.")
    if hold_back < 0 or (hold_back and cache is not None):
        raise DataError(
            "hold_back is a number of tokens of a fresh prompt, 0 or more; a given cache has acted already."
        )
    if documents is not None and (cache is not None or hold_back):
        raise DataError(
            "documents=... makes a cache of its own in front of the prompts; leave cache and hold_back out."
        )
    if documents is None and store is not None:
        raise DataError("store=... serves the chunks of documents; give documents=[...] with it.")
    choice = Choice(model, engine, require_kernels=require_kernels, compile=compile)
    decoding = {"streamer": streamer, "generation_config": generation_config, "choice": choice, **options}
    device = input_device(model)
    size = batch_size or max(1, len(texts))
    results: list[Generation] = []
    if documents is not None:
        from kvfoundry.blend.answering import answers_over

        results = answers_over(
            model, tokenizer, texts, documents, method, max_new_tokens, batch_size=size, chat=chat,
            answer_prefixes=prefixes, store=store, blend=blend, chunk_method=chunk_method, head=head,
            namespace=namespace, prefill_chunk=prefill_chunk, **decoding,
        )  # fmt: skip
    for start in range(0, len(texts) if documents is None else 0, size):
        batch = slice(start, start + size)
        ids, mask = encode(
            tokenizer, texts[batch], chat=chat, continued=cache is not None, answer_prefixes=prefixes[batch]
        )
        if not (method.slot_positions and prefill_chunk is not None):  # such a stream has no end
            longest = int(mask.sum(dim=1).max()) + (cache.seen_tokens if cache is not None else 0)
            check_length(model, longest, max_new_tokens, "the longest prompt")
        if hold_back >= int(mask.sum(dim=1).min()):
            raise DataError(f"hold_back={hold_back} leaves nothing of a prompt of {int(mask.sum(dim=1).min())} tokens.")
        results += generate_ids(
            model, tokenizer, ids.to(device), mask.to(device), method, max_new_tokens,
            cache=cache, prefill_chunk=prefill_chunk, hold_back=hold_back, **decoding,
        )  # fmt: skip
    choice.end()
    answers = results if details else [result.text for result in results]
    return answers[0] if single and len(answers) == 1 else answers


@torch.inference_mode()
def prefill(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: str,
    method: str | Method | None = None,
    *,
    prefill_chunk: int | None = None,
) -> KVCache:
    """The cache of a document, to be asked many times: `generate(..., question, cache=cache.fork())`.

    The method acts on the document alone, before any question is known; questions then add their own rows.
    prefill_chunk as in `generate`. Raises DataError for an empty document or one longer than the model's limit.
    """
    ids, mask = encode(tokenizer, [document], chat=False)
    cache = KVCache(model, method)
    if not cache.method.slot_positions:
        check_length(model, ids.shape[1], 0, "the document")
    device = input_device(model)
    read_prompt(model, tokenizer, cache, ids.to(device), mask.to(device), prefill_chunk)
    return cache


def read_prompt(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: KVCache,
    ids: Tensor,
    mask: Tensor,
    prefill_chunk: int | None = None,
) -> None:
    """Read a whole left-padded prompt [batch, tokens] into a fresh cache; its method has acted when this returns."""
    cache.expect_prompt(ids.shape[1])
    feed(model, ids, mask, cache, prefill_chunk or ids.shape[1], ids.shape[1])
    if cache.method.reconstructs is not None:
        compress_by_reconstruction(model, tokenizer, cache, ids, mask)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    *,
    chat: bool,
    continued: bool = False,
    answer_prefixes: list[str] | None = None,
) -> tuple[Tensor, Tensor]:
    """Token ids and mask of a batch, left-padded: [batch, tokens] each. Raises DataError for an empty prompt.

    continued: the text follows a cached document, so no special token goes in front. answer_prefixes: the beginning of
    each answer, behind the text and the chat template's generation prompt.
    """
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"prompt {i} is empty; give some text.")
    prefixes = answer_prefixes or [""] * len(texts)
    rows = [_encode_one(tokenizer, text, prefix, chat, continued) for text, prefix in zip(texts, prefixes, strict=True)]
    for i, row in enumerate(rows):
        if not row:
            raise DataError(f"prompt {i} has no tokens; give some text.")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def _encode_one(
    tokenizer: PreTrainedTokenizerBase, text: str, answer_prefix: str, chat: bool, continued: bool
) -> list[int]:
    if chat:
        if not tokenizer.chat_template:
            raise DataError("chat=True, but the tokenizer has no chat template; use chat=False.")
        turn = [{"role": "user", "content": text}]
        text = str(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))
    text = with_answer_begun(text, answer_prefix)
    # What is too long is refused by check_length, not warned of.
    return list(tokenizer(text, add_special_tokens=not chat and not continued, verbose=False)["input_ids"])


@dataclass(frozen=True)
class Held:
    """What a cache holds when its prompt is done: bytes, and the rows that are kept of each of its batch rows."""

    stored: int
    peak: int
    parked: int
    kept: list[Kept]
    prefill_share: float | None

    @classmethod
    def by(cls, cache: KVCache) -> Held:
        """What this cache holds now."""
        return cls(cache.nbytes, cache.peak_nbytes, cache.parked_nbytes, kept_by_row(cache), cache.prefill_share)


class _Clock(StoppingCriteria):
    """Notes when each token is ready, and what the cache holds when the prompt is done. Never stops anything."""

    def __init__(self, cache: KVCache, device: torch.device):
        self.cache, self.device = cache, device
        self.times: list[float] = []
        self.held: Held | None = None
        self._looking = 0.0

    def now(self) -> float:
        """Seconds, those spent on looking at the cache left out."""
        return time.perf_counter() - self._looking

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        if not self.times and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append(self.now())
        if len(self.times) == 1:
            began = time.perf_counter()
            self.held = Held.by(self.cache)
            self._looking = time.perf_counter() - began
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class _Reconstruct(StoppingCriteria):
    """Runs the second pass once the prompt is read and before the first decode step. Never stops anything."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: KVCache, ids: Tensor, mask: Tensor
    ):
        self.model, self.tokenizer, self.cache, self.ids, self.mask = model, tokenizer, cache, ids, mask
        self.done = False

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        if not self.done:
            self.done = True
            copies = self.cache.attention_layers[0].batch_size // self.ids.shape[0]  # beams, or several answers
            ids, mask = (tensor.repeat_interleave(copies, dim=0) for tensor in (self.ids, self.mask))
            compress_by_reconstruction(self.model, self.tokenizer, self.cache, ids, mask)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.inference_mode()
def generate_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    mask: Tensor,
    method: Method,
    max_new_tokens: int,
    *,
    cache: KVCache | None = None,
    context: tuple[Tensor, Tensor] | None = None,
    prefill_chunk: int | None = None,
    hold_back: int = 0,
    streamer: Any = None,
    generation_config: GenerationConfig | None = None,
    choice: Choice | None = None,
    **options: Any,
) -> list[Generation]:
    """`generate` for one batch whose token ids are made already: left-padded, [batch, tokens], on the model's device.

    context: ids and mask of what a given cache has seen, where it is a batch or its method repeats it. choice: who
    decodes, the same for all batches of a call. The caller has seen to it that prompts and answers fit the model.
    """
    started = time.perf_counter()
    outlives = cache is not None
    cache = KVCache(model, method) if cache is None else cache
    choice = choice or Choice(model, None, require_kernels=False, compile=False)
    by = choice.decoding(ids.device, cache, streamer, generation_config, options, outlives=outlives)
    past = cache.seen_tokens
    if cache.awaits_prompt and (prefill_chunk is not None or hold_back):
        cache.expect_prompt(ids.shape[1] - hold_back)
    if past:
        # transformers cuts the ids of the whole text down to what the cache has not seen; the cut part is never read.
        seen = context or (ids.new_zeros(ids.shape[0], past), mask.new_ones(mask.shape[0], past))
        ids, mask = (torch.cat(parts, dim=1) for parts in zip(seen, (ids, mask), strict=True))
    if hold_back:
        read = ids.shape[1] - hold_back
        feed(model, ids, mask, cache, prefill_chunk or read, read)
        if method.reconstructs is not None:
            compress_by_reconstruction(model, tokenizer, cache, ids[:, :read], mask[:, :read])
    elif prefill_chunk is not None:
        # The last piece goes in together with the first new token.
        feed(model, ids, mask, cache, prefill_chunk, past + (ids.shape[1] - past - 1) // prefill_chunk * prefill_chunk)
    clock = _Clock(cache, ids.device)
    repeats = method.reconstructs is not None and not hold_back and (not past or context is not None)
    second_pass = [_Reconstruct(model, tokenizer, cache, ids, mask)] if repeats else []
    criteria = StoppingCriteriaList([*second_pass, clock, *(options.get("stopping_criteria") or [])])
    if options.get("stop_strings"):
        criteria.append(StopStringCriteria(tokenizer, options["stop_strings"]))
    options = {name: value for name, value in options.items() if name not in ("stopping_criteria", "stop_strings")}
    output = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=mask,
        **{compat.CACHE_ARGUMENT: cache},
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        generation_config=generation_config,
        stopping_criteria=criteria,
        tokenizer=tokenizer if generation_config is not None and generation_config.stop_strings else None,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        **({} if by.method is None else {"custom_generate": by.method}),
        **options,
    )
    finished = clock.now()
    sequences = output if isinstance(output, Tensor) else output.sequences
    steps, held = len(clock.times) - 1, clock.held
    assert held is not None
    stops = stop_tokens(model, generation_config) if "eos_token_id" not in options else options["eos_token_id"]
    return generations(
        model,
        tokenizer,
        [until_stop(sequence, stops) for sequence in sequences[:, ids.shape[1] :].tolist()],
        mask.sum(dim=1).tolist(),
        held,
        ttft_seconds=clock.times[0] - started,
        ms_per_token=1e3 * (clock.times[-1] - clock.times[0]) / steps if steps > 0 else 0.0,
        seconds=finished - started,
        notes=[*cache.notes, *by.notes],
    )


def generations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    answers: Sequence[list[int]],
    prompt_tokens: Sequence[int],
    held: Held,
    **shared: Any,
) -> list[Generation]:
    """The answers to the prompts of one batch; a prompt may have several, which stand one after the other.

    shared: fields of `Generation` that all of them have.
    """
    per_prompt = len(answers) // len(prompt_tokens)
    copies = len(held.kept) // len(prompt_tokens)  # beams of one prompt hold the same rows of it
    results = []
    for i, tokens in enumerate(answers):
        of_prompt, kept = prompt_tokens[i // per_prompt], held.kept[i // per_prompt * copies]
        results.append(
            Generation(
                text=str(tokenizer.decode(tokens, skip_special_tokens=True)),
                token_ids=tokens,
                prompt_tokens=of_prompt,
                new_tokens=len(tokens),
                stored_bytes=held.stored // len(answers),
                peak_bytes=held.peak // len(answers),
                full_bytes=full_cache_bytes(model, of_prompt),
                kept_rows=kept.rows,
                kept_share=kept.share,
                kept_profile=kept.profile,
                parked_bytes=held.parked // len(answers),
                prefill_share=held.prefill_share,
                **shared,
            )
        )
    return results


def stop_tokens(model: PreTrainedModel, generation_config: GenerationConfig | None = None) -> int | list[int] | None:
    """The tokens that end an answer."""
    config = generation_config or model.generation_config
    return None if config is None else config.eos_token_id


def until_stop(tokens: list[int], stops: int | Collection[int] | None) -> list[int]:
    """The tokens up to and with the first stop token; what follows in a batch is padding."""
    ends = {stops} if isinstance(stops, int) else set(stops or ())
    for i, token in enumerate(tokens):
        if token in ends:
            return tokens[: i + 1]
    return tokens


def full_cache_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Bytes of keys and values that a full cache of `tokens` tokens holds in the model's dtype, windows included."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = 0
    for kind, kwargs in compat.layer_types(config):
        if kind in ("sliding_attention", "chunked_attention"):
            rows += min(tokens, kwargs["sliding_window"])
        elif kind == "full_attention":
            rows += tokens
    return 2 * rows * heads * head_dim * model.dtype.itemsize
