"""What the scheduler's side and the workers' side tell each other: plain data that can be sent to another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvfoundry.chunks import Identity
from kvfoundry.chunks.identity import ChunkKey


@dataclass(frozen=True)
class Tenant:
    """What of a request decides whose rows its are, beside the model. adapter: a digest of it; salt: vLLM's."""

    adapter: str = ""
    salt: str = ""

    def identity(self, model: Identity) -> Identity:
        """The identity of the model, for this tenant."""
        if not self.adapter and not self.salt:
            return model
        return Identity({**model.parts, "adapter": self.adapter, "salt": self.salt})


class Span(NamedTuple):
    """Tokens start to stop of a prompt, as an entry that was read behind its first `behind` tokens.

    behind < start: the entry was read elsewhere than it is used, so its keys have to move, and its rows do not know
    what stands in between.
    """

    start: int
    stop: int
    behind: int

    @property
    def moves(self) -> bool:
        """Whether it is used elsewhere than it was read."""
        return self.behind != self.start


def span_key(identity: Identity, token_ids: Tensor | Sequence[int], span: Span) -> ChunkKey:
    """The key of a span: its tokens, and those in front of it when it was read."""
    ids = torch.as_tensor(token_ids, dtype=torch.long)
    return identity.key(ids[span.start : span.stop], context_ids=ids[: span.behind])


class Prompt:
    """Whose a prompt is, its token ids [tokens], and the keys of its spans.

    A key names all tokens in front of its span, so those of a long prompt take a while: each is made once.
    """

    def __init__(self, tenant: Tenant, token_ids: Sequence[int]):
        self.tenant, self.ids = tenant, torch.tensor(token_ids, dtype=torch.long)
        self._keys: dict[Span, list[ChunkKey]] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def keys(self, models: Sequence[Identity], span: Span) -> list[ChunkKey]:
        """Of every worker's part of a span. models: the parts, always the same ones."""
        if span not in self._keys:
            self._keys[span] = [span_key(self.tenant.identity(model), self.ids, span) for model in models]
        return self._keys[span]


@dataclass(frozen=True, eq=False)
class Job:
    """Spans of one request to load or to save.

    token_ids: [tokens] of the prompt, up to the end of the last span. spans: without gaps. blocks: of the request, in
    order. first: the first token that may be written; those before it lie in blocks of others too. following: token ids
    of the prompt behind the spans, for whoever repairs documents by what is asked of them.
    """

    request: str
    tenant: Tenant
    token_ids: Tensor
    spans: tuple[Span, ...]
    blocks: tuple[int, ...]
    first: int = 0
    following: tuple[int, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether it has spans that are used elsewhere than they were read."""
        return any(span.moves for span in self.spans)


@dataclass(frozen=True)
class Work:
    """What one step asks of the workers."""

    loads: tuple[Job, ...] = ()
    saves: tuple[Job, ...] = ()


@dataclass(frozen=True)
class WorkerCard:
    """What a worker says of itself when it starts. identity: of what it stores; refusal: why it stores nothing.

    notes: lines for the log. The scheduler says each once, however many workers have the same.
    """

    identity: Identity | None = None
    refusal: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Held:
    """Names of entries that came into the memory of workers, and that turned out to be gone."""

    new: frozenset[str] = field(default_factory=frozenset)
    gone: frozenset[str] = field(default_factory=frozenset)

    def joined(self, other: Held) -> Held:
        """Of two workers, or of two steps."""
        return replace(self, new=(self.new - other.gone) | other.new, gone=self.gone | other.gone)
