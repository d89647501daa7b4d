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


def position_limit(model: Any) -> int | None:
    """Positions the model was made for, None when its configuration names no limit."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    return getattr(config, "max_position_embeddings", None)


def check_length(model: Any, prompt_tokens: int, max_new_tokens: int, what: str) -> None:
    """Refuse a prompt that does not fit.

    Raises:
        KVFoundryError: prompt and answer together need more positions than the model has.
    """
    limit = position_limit(model)
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        raise KVFoundryError(
            f"{what} has {prompt_tokens} tokens and asks for {max_new_tokens} more, "
            f"but the model is limited to {limit} positions; "
            f"shorten it to at most {max(limit - max_new_tokens, 0)} tokens or ask for fewer new tokens."
        )
