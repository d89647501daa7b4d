"""The rows of passages: from the store, or computed and put there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfoundry import compat
from kvfoundry.blend.identity import identity_now
from kvfoundry.cache import KVCache
from kvfoundry.chunks import ChunkKey, ChunkKV, ChunkStore, Identity
from kvfoundry.chunks.passage import read_passage
from kvfoundry.errors import SpecError
from kvfoundry.method import Method
from kvfoundry.rag.prompts import Candidate, Ids, Laid
from kvfoundry.rag.summaries import PAGE, KeySummary, Kind, summary_path


@dataclass(frozen=True, eq=False)
class Maker:
    """Chunks of one model under one method.

    folder: where summaries lie, None to keep them nowhere. also: a store of before, from which chunks are copied.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    store: ChunkStore
    method: Method
    folder: Path | None = None
    kind: Kind = "centroid"
    page: int = PAGE
    namespace: str = ""
    also: ChunkStore | None = None

    def __post_init__(self) -> None:
        if self.method.evicts or self.method.pairs is not None or self.method.slot_positions:
            raise SpecError(
                f"{self.method} leaves gaps in a passage, and a chunk that comes in mid-decode takes its whole place; "
                "use fullkv, or a codec such as int8."
            )

    @property
    def identity(self) -> Identity:
        """Of the chunks that this makes."""
        return identity_now(self.model, self.tokenizer, self.method, self.namespace)

    def read(self, token_ids: Ids, behind: Ids) -> ChunkKV:
        """Compute a passage's chunk."""
        return read_passage(self.model, token_ids, self.method, context_ids=behind, tokenizer=self.tokenizer)

    def stored(self, key: ChunkKey) -> ChunkKV | None:
        """The chunk of a key, if it is stored anywhere; `store` has it then."""
        found = self.store.get(key)
        if found is None and self.also is not None:
            found = self.also.get(key)
            if found is not None:
                self.store.put(key, found)
        return found

    def get(self, key: ChunkKey) -> ChunkKV:
        """The chunk of a key; computed and put where the store has none."""
        return self.store.fetch(key, lambda: self.read(_ids(key.token_ids), _ids(key.context_ids)))

    def summary(self, key: ChunkKey, chunk: Callable[[], ChunkKV]) -> KeySummary:
        """The summary of a chunk: as it was kept, or made, and kept."""
        path = None if self.folder is None else summary_path(self.folder, key.id, self.kind, self.page)
        found = None if path is None else KeySummary.load(path, self.kind, self.page)
        if found is None:
            found = KeySummary.of(chunk().plain(self.model), self.kind, self.page)
            if path is not None:
                found.save(path)
        return found

    def has_summary(self, key: ChunkKey) -> bool:
        """Whether it is kept."""
        return self.folder is not None and summary_path(self.folder, key.id, self.kind, self.page).exists()

    @torch.inference_mode()
    def read_in_order(self, prompt: Laid, wanted: list[Candidate]) -> dict[str, ChunkKV]:
        """Chunks, by passage id, of candidates that are read behind all that stands in front of them, in one call.

        Raises:
            SpecError: a codec, which would write down rows of passages that later ones still read whole.
        """
        if self.method.codec is not None:
            raise SpecError(f"behind=sample reads all passages in one call, which {self.method} cannot serve; fullkv.")
        stop = max(each.stop for each in wanted)
        ids = torch.tensor([[*prompt.head, *(token for each in prompt.candidates for token in each.token_ids)]])
        ids = ids[:, :stop].to(self.model.device)
        cache = KVCache(self.model, self.method)
        for layer in cache.attention_layers:
            layer.keeps_whole_window = True
        self.model(ids, use_cache=True, logits_to_keep=1, **{compat.CACHE_ARGUMENT: cache})
        found = {}
        for each in sorted(wanted, key=lambda each: -each.at):
            cache.crop(each.stop)
            found[each.id] = ChunkKV.from_cache(cache, ids[0, : each.stop], start=each.at)
        return found


def _ids(tensor: torch.Tensor) -> Ids:
    return tuple(tensor.tolist())
