"""The beginning of an answer: counted, hashed, hidden with the question, and gone on from."""

import pytest

import kvfoundry
from kvfoundry.errors import DataError
from kvfoundry.evaluate.prompts import encode_item, encode_prompt, hash_ids, hidden_tokens
from kvfoundry.evaluate.results import RESULTS, read_lines
from kvfoundry.evaluate.runner import evaluate
from kvfoundry.evaluate.tasks.base import Item

TEXT = "the river rose above the lower step and the roof began to leak"


class Fixed:
    """A task of given items; a score of 1 for anything."""

    name = "fixed"

    def __init__(self, *items):
        self.made = list(items)

    def settings(self):
        return {}

    def items(self, tokenizer, chat, seed):
        return self.made

    def score(self, item, prediction):
        return 1.0, True


def item(name="a", prefix=" the answer is", chat=None, question=" the roof began to leak"):
    return Item(name, TEXT, ("x",), 2, question=question, answer_prefix=prefix, chat=chat)


@pytest.mark.parametrize("chat", [True, False])
def test_the_prefix_is_the_end_of_the_prompt(tokenizer, chat):
    plain, longer = (encode_prompt(tokenizer, TEXT, chat, prefix) for prefix in ("", " the answer is"))
    tail = tokenizer("the answer is", add_special_tokens=False)["input_ids"]
    assert longer == plain + tail
    assert hash_ids(longer) != hash_ids(plain)


def test_an_item_overrules_the_chat_of_the_run(tokenizer):
    assert encode_item(tokenizer, item(chat=False), True) == encode_prompt(tokenizer, TEXT, False, " the answer is")
    assert encode_item(tokenizer, item(), True) == encode_prompt(tokenizer, TEXT, True, " the answer is")


def test_hidden_are_question_template_and_prefix(tokenizer):
    assert hidden_tokens(tokenizer, item(), False) == 5 + 3
    assert hidden_tokens(tokenizer, item(), True) == 5 + 3 + 2  # [end] [assistant]
    assert hidden_tokens(tokenizer, item(question=""), True) == 3
    assert hidden_tokens(tokenizer, item(question="", prefix=""), True) == 0


def test_the_model_goes_on_from_the_prefix(model, tokenizer):
    prompts, prefixes = [TEXT, "the old mill"], [" the answer is", " some said"]
    asked = kvfoundry.generate(model, tokenizer, prompts, answer_prefix=prefixes, max_new_tokens=4)
    plain = [prompt + prefix for prompt, prefix in zip(prompts, prefixes, strict=True)]
    assert asked == kvfoundry.generate(model, tokenizer, plain, max_new_tokens=4)
    with pytest.raises(DataError, match="2 answer prefixes for 1 prompts"):
        kvfoundry.generate(model, tokenizer, TEXT, answer_prefix=prefixes)


def test_runner_honours_prefix_and_chat_of_each_item(model, tokenizer, tmp_path):
    task = Fixed(item("a"), item("b", chat=False), item("c", prefix="", chat=True), item("d", question=""))
    evaluate(model, tokenizer, [task], ["snapkv(budget=6, window=4)"], out=tmp_path, batch_size=4,
             hide_question=True)  # fmt: skip
    lines = {line["item"]: line for line in read_lines(tmp_path / RESULTS)}
    for made in task.made:
        ids = encode_item(tokenizer, made, True)
        assert lines[made.item]["prompt_tokens"] == len(ids) and lines[made.item]["prompt_hash"] == hash_ids(ids)
        assert lines[made.item]["kept_rows"] == 6 + hidden_tokens(tokenizer, made, True)
