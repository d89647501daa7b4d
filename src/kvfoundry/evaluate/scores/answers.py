"""Short answers to questions about passages: what of a prediction counts as the answer, exact match and F1.

Source: YaoJiayi/CacheBlend, example/utils.py. The reference counts F1 over the tokens of the model at hand; here it is
over words, so that scores of models with different tokenizers compare.
"""

from kvfoundry.evaluate.scores.longbench import first_line
from kvfoundry.evaluate.scores.words import bag_f1, normal_form


def given_answer(prediction: str) -> str:
    """The first line after leading newlines; Yes or No where it begins so, whatever follows.

    A yes is looked for at the very start of the line, a no at the start of its first word ("Nothing" is a No too).
    """
    line = first_line(prediction)
    if line.startswith(("Yes", "yes")):
        return "Yes"
    if line.split()[:1] and line.split()[0].startswith(("No", "no")):
        return "No"
    return line


def answer_f1(prediction: str, answer: str) -> float:
    """F1 over the words of the normal forms; where a side has none, 1 if both have none and else 0."""
    found, wanted = (normal_form(text).split() for text in (given_answer(prediction), answer))
    return bag_f1(found, wanted) if found and wanted else float(not found and not wanted)


def exact_match(prediction: str, answer: str) -> bool:
    """Whether the normal forms are equal."""
    return normal_form(given_answer(prediction)) == normal_form(answer)


def as_question(text: str) -> str:
    """With a question mark at the end and a small letter at the start, as CacheBlend puts a question after "answer"."""
    text = text if text.endswith("?") else text + "?"
    return text[0].lower() + text[1:]
