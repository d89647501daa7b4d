"""From the text of a prompt to its token ids, the same for counting, hashing and the length limit."""

import hashlib
from collections.abc import Sequence
from typing import Any

from kvfoundry.errors import KVFoundryError
from kvfoundry.evaluate.tasks.base import Item
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


def encode_prompt(tokenizer: Any, text: str, chat: bool, answer_prefix: str = "") -> list[int]:
    """Token ids of one user text and the beginning of its answer, exactly those that `kvfoundry.generate` sees.

    Raises:
        DataError: the text is empty.
    """
    ids, _ = encode(tokenizer, [text], chat=chat, answer_prefixes=[answer_prefix])
    return ids[0].tolist()


def encode_item(tokenizer: Any, item: Item, chat: bool) -> list[int]:
    """Token ids of an item's whole prompt; `chat` is the run's setting, which the item may overrule."""
    return encode_prompt(tokenizer, item.prompt, item_chat(item, chat), item.answer_prefix)


def item_chat(item: Item, chat: bool) -> bool:
    return chat if item.chat is None else item.chat


def hidden_tokens(tokenizer: Any, item: Item, chat: bool) -> int:
    """How many tokens at the end of an item's prompt are its question and the beginning of its answer.

    What the chat template puts behind the question counts too.
    """
    whole = encode_item(tokenizer, item, chat)
    if not item.question and not item.answer_prefix:
        return 0
    text = encode_prompt(tokenizer, item.prompt.removesuffix(item.question), item_chat(item, chat))
    shared = next((i for i, (left, right) in enumerate(zip(whole, text, strict=False)) if left != right), len(text))
    return len(whole) - shared


def hash_ids(ids: Sequence[int]) -> str:
    """Sixteen hex digits that two prompts share only when their token ids are equal."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]
