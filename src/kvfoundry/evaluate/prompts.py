"""From the text of a prompt to its token ids, the same for counting, hashing and the length limit."""

import hashlib
from collections.abc import Sequence
from typing import Any

from kvfoundry.errors import KVFoundryError
from kvfoundry.generation import encode


def has_chat_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def resolve_chat(tokenizer: Any, chat: bool | None) -> bool:
    """None means: use the chat template when the tokenizer has one.

    Raises:
        KVFoundryError: a template is asked for and the tokenizer has none.
    """
    if chat and not has_chat_template(tokenizer):
        raise KVFoundryError("the tokenizer of this model has no chat template; use --no-chat (chat=False).")
    return has_chat_template(tokenizer) if chat is None else chat


def encode_prompt(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """Token ids of one user text, exactly those that `kvfoundry.generate` sees.

    Raises:
        DataError: the text is empty.
    """
    ids, _ = encode(tokenizer, [text], chat=chat)
    return ids[0].tolist()


def question_tokens(tokenizer: Any, prompt: str, question: str, chat: bool) -> int:
    """How many tokens at the end of the prompt are its question, what the chat template puts behind it included."""
    whole = encode_prompt(tokenizer, prompt, chat)
    text = encode_prompt(tokenizer, prompt.removesuffix(question), chat)
    shared = next((i for i, (left, right) in enumerate(zip(whole, text, strict=False)) if left != right), len(text))
    return len(whole) - shared


def hash_ids(ids: Sequence[int]) -> str:
    """Sixteen hex digits that two prompts share only when their token ids are equal."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]
