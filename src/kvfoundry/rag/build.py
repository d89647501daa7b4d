"""The second step of the pipeline: every passage that may be read leaves its keys and values in the store.

The best of a sample, as many as fit, are what the device holds when the answer begins. The others are placeholders:
their KV waits on the host, or nothing but their text and a summary of their keys does. What is stored is not computed
again, so a run that was cut short goes on where it stood.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from kvfoundry.blend.check import RowShape, require_exact
from kvfoundry.chunks import ChunkKV
from kvfoundry.rag.dataset import Dataset
from kvfoundry.rag.kv_file import BuiltChunk, BuiltSample, KvFile, Tier, identity_digest
from kvfoundry.rag.making import Maker
from kvfoundry.rag.prompts import Laid
from kvfoundry.rag.retrieval_file import Retrieval
from kvfoundry.rag.room import Room, first_residents

Placeholders = Literal["kv", "text"]
OnProgress = Callable[[str, int, int], None]


def token_bytes(shape: RowShape) -> int:
    """Bytes that one token's rows take on the device, all layers together."""
    return sum(heads * (keys + values) for heads, keys, values in shape.layers) * shape.dtype.itemsize


def build(
    maker: Maker,
    prompts: Sequence[Laid],
    dataset: Dataset,
    retrieval: Retrieval,
    *,
    room: Room,
    placeholders: Placeholders = "kv",
    settings: dict[str, Any] | None = None,
    skipped: Sequence[str] = (),
    on_progress: OnProgress | None = None,
) -> KvFile:
    """Bring the chunks of all samples into the maker's store, and say where each begins.

    settings: kept in the file for decoding. Raises as the model's check and the store do.
    """
    began = time.perf_counter()
    shape = require_exact(maker.model)
    identity, per_token = maker.identity, token_bytes(shape)
    samples = []
    for done, prompt in enumerate(prompts, start=1):
        sizes = [per_token * len(each.token_ids) for each in prompt.candidates]
        resident = first_residents(sizes, prompt.ranks, prompt.found, room.of(sizes))
        tiers: list[Tier] = [
            "device" if number in resident else "host" if placeholders == "kv" else "text"
            for number in range(len(sizes))
        ]
        spent = _stored(maker, prompt, tiers)
        chunks = tuple(
            BuiltChunk(each.id, each.key(identity).id, len(each.token_ids), tier, size, round(seconds, 4))
            for each, tier, size, seconds in zip(prompt.candidates, tiers, sizes, spent, strict=True)
        )
        samples.append(BuiltSample(prompt.item, chunks))
        if on_progress is not None:
            on_progress("samples", done, len(prompts))
    return KvFile(
        dict(retrieval.dataset),
        retrieval.about.get("retriever", ""),
        identity_digest(identity),
        {
            **(settings or {}),
            "room": str(room),
            "placeholders": placeholders,
            "summary": maker.kind,
            "page": maker.page,
        },
        tuple(samples),
        tuple(skipped),
        round(time.perf_counter() - began, 3),
    )


def _stored(maker: Maker, prompt: Laid, tiers: Sequence[Tier]) -> list[float]:
    """Make sure of chunks and summaries of one sample; seconds for each candidate."""
    identity = maker.identity
    head = prompt.head_key(identity)
    if not maker.store.contains(head) and maker.stored(head) is None:
        maker.store.put(head, maker.read(prompt.head, ()))
    lacking = []
    for number, (each, tier) in enumerate(zip(prompt.candidates, tiers, strict=True)):
        key = each.key(identity)
        kept = tier == "text" or maker.store.contains(key) or (maker.also is not None and maker.stored(key) is not None)
        if not kept or not maker.has_summary(key):
            lacking.append(number)
    spent = [0.0] * len(tiers)
    if not lacking:
        return spent
    in_order: dict[str, ChunkKV] = {}
    if _is_in_order(prompt):
        began = time.perf_counter()
        in_order = maker.read_in_order(prompt, [prompt.candidates[number] for number in lacking])
        spent = [
            (time.perf_counter() - began) / len(lacking) if number in lacking else 0.0 for number in range(len(tiers))
        ]
    for number in lacking:
        each, began = prompt.candidates[number], time.perf_counter()
        key = each.key(identity)
        stored = maker.stored(key) if tiers[number] != "text" else None
        chunk = stored or in_order.get(each.id) or maker.read(each.token_ids, each.behind)
        if tiers[number] != "text" and stored is None:
            maker.store.put(key, chunk)
        maker.summary(key, lambda chunk=chunk: chunk)  # type: ignore[misc]
        spent[number] += time.perf_counter() - began
    return spent


def _is_in_order(prompt: Laid) -> bool:
    """Whether passages are read behind each other."""
    return len({each.behind for each in prompt.candidates}) > 1
