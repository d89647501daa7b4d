"""Documents that a request marks in its prompt: `kv_transfer_params={"documents": [[start, stop], ...]}`.

Token boundaries, one document behind the other; what stands in front of the first is the head, what follows the last is
computed. A document is stored as it was read directly behind the head, and used at any place behind it with its keys
moved there: approximate wherever another document stands in between, also when it is repaired (`repair.py`). Off unless
the server says `documents: approximate` and the request marks its documents; and where vLLM caches prefixes itself the
request needs a `cache_salt`, because others must not be served such rows as exact ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from kvfoundry.chunks.identity import digest
from kvfoundry.integrations.vllm.messages import Span

# The name of the marks among a request's kv_transfer_params.
FIELD = "documents"
DIGESTS = "document_digests"


class Documents:
    """serves: whether marks are obeyed. caches: whether vLLM keeps prefixes itself. say: takes a line for the log.

    repairs: whether a copy of the model computes tokens of them again; it has no adapters.
    """

    def __init__(self, serves: bool, caches: bool, say: Callable[[str], None], repairs: bool = False):
        self._serves, self._caches, self._say, self._repairs = serves, caches, say, repairs
        self._said_off = False

    def spans(self, request: Any) -> list[Span] | None:
        """Head and documents of a request; None for one without marks, an empty list for one that is read in full."""
        given = getattr(request, "kv_transfer_params", None) or {}
        if FIELD not in given:
            return None
        if not self._serves:
            if not self._said_off:
                self._say("documents that requests mark are read as ordinary text: this server has documents: off")
            self._said_off = True
            return None
        fault = self._fault(given, list(request.prompt_token_ids), request.cache_salt)
        if not fault and self._repairs and request.lora_request is not None:
            fault = "its documents cannot be repaired with an adapter"
        if fault:
            self._say(f"request {request.request_id} is computed in full: {fault}")
            return []
        head = given[FIELD][0][0]
        return [*([Span(0, head, 0)] if head else []), *(Span(start, stop, head) for start, stop in given[FIELD])]

    def _fault(self, given: dict[str, Any], tokens: list[int], salt: str | None) -> str:
        marks, digests = given[FIELD], given.get(DIGESTS)
        pairs = isinstance(marks, list) and all(isinstance(mark, list) and len(mark) == 2 for mark in marks)
        if not pairs or not marks or not all(type(end) is int for mark in marks for end in mark):
            return "its documents are not a list of [first token, token behind the last]"
        ends = [0, *(end for mark in marks for end in mark), len(tokens)]
        if ends != sorted(ends) or any(start == stop for start, stop in marks):
            return "its documents do not lie in order within its prompt"
        if any(one[1] != other[0] for one, other in pairwise(marks)):
            return "something stands between its documents; a separator belongs to the document in front of it"
        if digests is not None and digests != [tokens_digest(tokens[start:stop]) for start, stop in marks]:
            return "its document marks do not fit its tokens"
        if self._caches and not salt:
            return "documents at other places need a cache_salt where vLLM caches prefixes itself"
        return ""


def tokens_digest(token_ids: Sequence[int]) -> str:
    """A short name of token ids, by which a mark is compared with what it marks."""
    return digest(b"".join(int(token).to_bytes(8, "little") for token in token_ids))[:16]
