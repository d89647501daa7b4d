"""The 21 data sets of LongBench and the published rule of each.

Source: THUDM/LongBench, config/dataset2maxlen.json, pred.py, eval.py and the data set card.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvfoundry.errors import unknown_name
from kvfoundry.evaluate.tasks.base import TaskError


@dataclass(frozen=True)
class DataSet:
    """One data set.

    Attributes:
        metric: name in `scores.longbench.METRICS`.
        max_new_tokens: generation length.
        published: SHA-256 of the published prompt template, its fields unfilled.
        chat: the prompt goes into the model's chat template; the others are plain text even for a chat model, since
            they are examples to go on with.
        first_line: only the first line of a prediction is scored.
        in_e: also in LongBench-E, whose lengths are spread evenly.
        takes_input: samples bring an `input` beside their `context`: a question, or the start of what is to be ended.
        line_ends: a line break ends the answer while it is generated.
    """

    name: str
    language: Literal["en", "zh", "code"]
    metric: str
    max_new_tokens: int
    published: str
    chat: bool = True
    first_line: bool = False
    in_e: bool = False
    takes_input: bool = True
    line_ends: bool = False

    def length_of(self, *texts: str) -> int:
        """Length as LongBench counts it: characters of Chinese, words of everything else."""
        return sum(len(text) if self.language == "zh" else len(text.split()) for text in texts)


_THREE_QA = "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb"  # one template for three data sets

DATA_SETS: dict[str, DataSet] = {
    data_set.name: data_set
    for data_set in (
        DataSet("narrativeqa", "en", "qa_f1", 128, "aada7ed24b06abace5b0045ac3bcfe06fc831a6cf434f0ecfd99fb7b3d299e1c"),
        DataSet(
            "qasper", "en", "qa_f1", 128, "0fbdd123fe7f83d6d6a9c583ca28cb29d68e523bf8fec01a0cf2dcd11037775d", in_e=True
        ),
        DataSet(
            "multifieldqa_en", "en", "qa_f1", 64, "20b4666a2de8a1f701bdb6c4e015fa9f8758d64b361d841f7766df6c9ceba770",
            in_e=True,
        ),
        DataSet(
            "multifieldqa_zh", "zh", "qa_f1_zh", 64, "344b3a4e557cd5470c661b3d6b374339717e1257a6c01f628d22322d4a554b94"
        ),
        DataSet("hotpotqa", "en", "qa_f1", 32, _THREE_QA, in_e=True),
        DataSet("2wikimqa", "en", "qa_f1", 32, _THREE_QA, in_e=True),
        DataSet("musique", "en", "qa_f1", 32, _THREE_QA),
        DataSet("dureader", "zh", "rouge_zh", 128, "ae53329f51b17908e08b8c6bf366987282b8b38c0ee35275ebd7b79e9b30eff2"),
        DataSet(
            "gov_report", "en", "rouge", 512, "91c25d585b189ced91c9280efcb4ecb5dcff9548cd4e3bfae66c68025b569e95",
            in_e=True, takes_input=False,
        ),
        DataSet("qmsum", "en", "rouge", 512, "dca23b678fe0183bbd9555b57947022aed1b85739da5ad7e1b4708dd0c71c409"),
        DataSet(
            "multi_news", "en", "rouge", 512, "2af3f28c40b902e6535d4910510d51653613c49de9b2fc287c5958395061101d",
            in_e=True, takes_input=False,
        ),
        DataSet(
            "vcsum", "zh", "rouge_zh", 512, "3e5d8241bc9b512eb4929c1ba80882a44f50b446bc2b1d9d79eff030dd10dc27",
            takes_input=False,
        ),
        DataSet(
            "trec", "en", "classification", 64, "0eff8bebdba99d91e9d7d91b6ab39455ac74648bea92c9255c9f68c62175b2db",
            chat=False, first_line=True, in_e=True,
        ),
        DataSet(
            "triviaqa", "en", "qa_f1", 32, "00a802e6377e72fca39b169cf6c28893bedf23ba7286b03ecd15867c3e27a7c4",
            chat=False, first_line=True, in_e=True,
        ),
        DataSet(
            "samsum", "en", "rouge", 128, "a68d884234907eefcaa0eacf7b2997f60fa46603988dceae6a44f9b49f045b3f",
            chat=False, first_line=True, in_e=True, line_ends=True,
        ),
        DataSet(
            "lsht", "zh", "classification", 64, "f3edabdf7fae53d6cadfa7a10f3574d114302161c46dacecd5d30763204bbbf3",
            chat=False, first_line=True,
        ),
        DataSet(
            "passage_count", "en", "count", 32, "986550b6c61009c629a4535766d94b7b51e2b2b9e1ed169e4ecb54417466e964",
            in_e=True, takes_input=False,
        ),
        DataSet(
            "passage_retrieval_en", "en", "retrieval", 32,
            "39b96b7fa52bdd2aa2bde34ea199158505201b9a0a2c3ce94e80249293f60431", in_e=True,
        ),
        DataSet(
            "passage_retrieval_zh", "zh", "retrieval_zh", 32,
            "c1e2346e245eb365bc33a1503cde2e473948a2aad51c3e4c72893e61ab074d60",
        ),
        DataSet(
            "lcc", "code", "code_sim", 64, "6a1f24cf0bb83cd90f1fca8f0dd24801626c2aaea29db834ddc83b950e71190e",
            chat=False, in_e=True, takes_input=False,
        ),
        DataSet(
            "repobench-p", "code", "code_sim", 64, "ee9ec182ea5ffeb70a7140d55baea97264a8612d88226d323afa90859c36240c",
            chat=False, in_e=True,
        ),
    )
}  # fmt: skip

# The English list; data sets of code count as English.
ENGLISH: tuple[str, ...] = tuple(name for name, data_set in DATA_SETS.items() if data_set.language != "zh")


def choose(names: Iterable[str], e: bool = False) -> list[DataSet]:
    """The named data sets, each once ("all" for every one); without names the English ones, with `e` of LongBench-E.

    Raises:
        TaskError: an unknown name, or one that LongBench-E does not have.
    """
    offered = {name: data_set for name, data_set in DATA_SETS.items() if data_set.in_e or not e}
    wanted = list(dict.fromkeys(names)) or [name for name in offered if name in ENGLISH]
    if wanted == ["all"]:
        return list(offered.values())
    for name in wanted:
        if name not in offered:
            kind = "LongBench-E data set" if e and name in DATA_SETS else "LongBench data set"
            raise TaskError(unknown_name(kind, name, offered))
    return [offered[name] for name in wanted]
