"""A question about one or a few documents among many that do not help."""

from kvfoundry.evaluate.tasks.ruler.base import Draft, Filler, Setting
from kvfoundry.evaluate.tasks.ruler.qa_data import QAData, Question

TASK = "the question from the documents {where}, in a few words and without an explanation."
INTRO = "Answer " + TASK.format(where="below") + "\n\n"
QUESTION = "\n\nAnswer " + TASK.format(where="above") + "\nQuestion: {question}"
ANSWER = "\nAnswer:"


def draft(question: Question, data: QAData, setting: Setting) -> Draft:
    """The needed documents and as many others, all in random order. A unit of filler is a document.

    Distractors are the question's near documents first, then any of the file, each part in random order.
    """
    rng = setting.rng("distractors")
    known = {*question.needed, *question.near}
    others = [place for place in range(len(data.documents)) if place not in known]
    distractors = [*rng.sample(question.near, len(question.near)), *rng.sample(others, len(others))]
    order = [*question.needed, *distractors]

    def context(size: int) -> str:
        chosen = order[:size]
        setting.rng("order").shuffle(chosen)
        return "\n\n".join(
            f"Document {number}:\n{data.documents[place]}" for number, place in enumerate(chosen, start=1)
        )

    return Draft(
        filler=Filler(context, len(question.needed), len(order), "documents"),
        before=INTRO,
        question=QUESTION.format(question=question.question),
        answer_prefix=ANSWER,
        references=question.answers,
    )
