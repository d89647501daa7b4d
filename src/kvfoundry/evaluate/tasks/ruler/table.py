"""The thirteen tasks with their published numbers.

Source: the task table of the public generator of RULER (Hsieh et al., 2024, arXiv:2404.06654).
"""

from dataclasses import dataclass
from typing import Literal

from kvfoundry.evaluate.tasks.ruler.counting import CodedSpec, CommonSpec
from kvfoundry.evaluate.tasks.ruler.niah import NeedleSpec
from kvfoundry.evaluate.tasks.ruler.qa_data import Style
from kvfoundry.evaluate.tasks.ruler.variables import ChainSpec


@dataclass(frozen=True)
class QASpec:
    """Questions of a file of this style."""

    style: Style


@dataclass(frozen=True)
class Variant:
    """One task: what is asked, how long the answer may be (in tokens, part of the length), and how it is matched."""

    spec: NeedleSpec | ChainSpec | CommonSpec | CodedSpec | QASpec
    answer_tokens: int
    metric: Literal["all", "part"] = "all"


VARIANTS: dict[str, Variant] = {
    "niah_single_1": Variant(NeedleSpec("noise"), 128),
    "niah_single_2": Variant(NeedleSpec("essay"), 128),
    "niah_single_3": Variant(NeedleSpec("essay", values="identifier"), 128),
    "niah_multikey_1": Variant(NeedleSpec("essay", num_keys=4), 128),
    "niah_multikey_2": Variant(NeedleSpec("needles"), 128),
    "niah_multikey_3": Variant(NeedleSpec("needles", keys="identifier", values="identifier"), 128),
    "niah_multivalue": Variant(NeedleSpec("essay", values_per_key=4), 128),
    "niah_multiquery": Variant(NeedleSpec("essay", num_keys=4, queries=4), 128),
    "vt": Variant(ChainSpec(), 30),
    "cwe": Variant(CommonSpec(), 120),
    "fwe": Variant(CodedSpec(), 50),
    "qa_1": Variant(QASpec("squad"), 32, "part"),
    "qa_2": Variant(QASpec("hotpot"), 32, "part"),
}
