"""From the text of a prompt to its token ids, the same for counting, hashing and the length limit."""

import hashlib
from collections.abc import Sequence
from typing import Any

from kvfoundry.errors import DataError, KVFoundryError
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


def line_stops(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Options of `generate` under which a line break ends the answer, though it may not be the first token."""
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    line_break = tokenizer("\n", add_special_tokens=False)["input_ids"]
    return {"eos_token_id": list(dict.fromkeys([*ends, *line_break[-1:]])), "min_new_tokens": 1}


def kept_ends(tokens: int, most: int) -> tuple[int, int]:
    """How many tokens stay at the head and at the tail of a text of `tokens` when `most` are allowed.

    Too long a text keeps half of `most` on either side; an odd `most` keeps one token less.
    """
    return (tokens, 0) if tokens <= most else (most // 2, most // 2)


def cut_middle(tokenizer: Any, text: str, most: int) -> str:
    """The text without its middle, so that about `most` tokens are left (special ones of the tokenizer counted).

    Head and tail are decoded on their own and joined as text, so that the count of the result may differ by a few.

    Raises:
        DataError: `most` leaves no token on either side.
    """
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    head, tail = kept_ends(len(ids), most)
    if tail == 0 and len(ids) > most:
        raise DataError(f"a prompt of {len(ids)} tokens cannot be cut to {most}; allow for at least 2.")
    if tail == 0:
        return text
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:head], ids[-tail:]))


def fit(tokenizer: Any, text: str, chat: bool, most: int) -> str:
    """The text, its middle cut out where its prompt, chat template included, has more than `most` tokens.

    Raises:
        DataError: the template alone leaves no room.
    """
    tokens = len(encode_prompt(tokenizer, text, chat))
    excess, room, fitted = tokens - most, most - (tokens - len(tokenizer(text, verbose=False)["input_ids"])), text
    while excess > 0:
        fitted = cut_middle(tokenizer, text, room)
        excess = len(encode_prompt(tokenizer, fitted, chat)) - most
        room -= excess
    return fitted


def hash_ids(ids: Sequence[int]) -> str:
    """Sixteen hex digits that two prompts share only when their token ids are equal."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]
