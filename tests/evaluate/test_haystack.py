"""The generated prose: the same everywhere, varied, without the needles' words; and the folder of texts."""

import itertools
import os
import subprocess
import sys

import pytest

from kvfoundry.errors import DataError
from kvfoundry.evaluate.metrics import contains_answer
from kvfoundry.evaluate.tasks.haystack import folder_sentences, generated_sentences
from kvfoundry.evaluate.tasks.needles import CITIES, KINDS


def take(seed, count):
    return list(itertools.islice(generated_sentences(seed), count))


def test_same_seed_same_text_in_another_process_with_another_hash_seed():
    program = (
        "import itertools; from kvfoundry.evaluate.tasks.haystack import generated_sentences;"
        "print(''.join(itertools.islice(generated_sentences(3), 50)), end='')"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    text = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert text == "".join(take(3, 50))
    assert take(3, 50) != take(4, 50)


def test_prose_is_varied():
    sentences = take(0, 400)
    assert len(set(sentences)) > 370
    for start in range(0, 380, 20):
        assert len(set(sentences[start : start + 20])) == 20
    words = [word for sentence in sentences for word in sentence.split()]
    assert len(set(words)) > 700


def test_every_sentence_is_one():
    for sentence in take(1, 400):
        text = sentence.strip()
        assert text[0].isupper() and text.endswith(".") and "{" not in text and "  " not in text
        assert sentence.startswith(("\n\n", " "))


def test_needle_words_are_not_in_the_prose():
    text = "".join(take(2, 3000))
    for word in [*CITIES, *(answer for kind in KINDS.values() for answer in kind.answers or ())]:
        assert not contains_answer(word, text), word


def test_folder_is_read_in_name_order(tmp_path):
    (tmp_path / "b.txt").write_text("Third one.\n\nFourth\none!", encoding="utf-8")
    (tmp_path / "a.md").write_text("First one. Second one?", encoding="utf-8")
    (tmp_path / "c.csv").write_text("not,text")
    assert folder_sentences(tmp_path) == ["\n\nFirst one.", " Second one?", "\n\nThird one.", "\n\nFourth one!"]


def test_folder_refusals(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        folder_sentences(tmp_path / "none")
    with pytest.raises(DataError, match="holds no"):
        folder_sentences(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"a\.txt cannot be read as UTF-8"):
        folder_sentences(tmp_path)
