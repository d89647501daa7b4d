"""For clients: prompts with marked documents, ready for `client.completions.create(model=..., **request)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvfoundry.blend.segments import SEPARATOR, segment
from kvfoundry.integrations.vllm.documents import DIGESTS, FIELD, tokens_digest

# Requests with it share vLLM's own prefix cache among themselves, and with no ordinary request.
SALT = "kvfoundry documents"


def document_request(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    question: str,
    *,
    head: str = "",
    separator: str = SEPARATOR,
    chat: bool = False,
    salt: str = SALT,
) -> dict[str, Any]:
    """A completion request whose prompt is head, documents and question, with the documents' token boundaries.

    Segments are tokenized one by one, so a document has the same ids wherever it stands. Raises DataError as `segment`.
    """
    cut = segment(tokenizer, documents, question, head=head, separator=separator, chat=chat)
    marks, at = [], len(cut.head)
    for passage in cut.passages:
        marks.append([at, at + len(passage)])
        at += len(passage)
    fields = {FIELD: marks, DIGESTS: [tokens_digest(passage) for passage in cut.passages]}
    return {"prompt": cut.ids, "extra_body": {"kv_transfer_params": fields, "cache_salt": salt}}


def reading_requests(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], **options: Any
) -> list[dict[str, Any]]:
    """One request per document that reads it behind the head alone, which stores it. options: as `document_request`."""
    requests = [document_request(tokenizer, [document], "\n", **options) for document in documents]
    return [{**request, "max_tokens": 1, "temperature": 0} for request in requests]
