"""The heat maps: a picture that opens, with every method, length and depth on it."""

import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from kvfoundry.errors import MissingExtraError
from kvfoundry.evaluate.picture import draw_heat_maps, require_matplotlib

METHODS = ("fullkv", "snapkv(budget=64, window=8)", "h2o(budget=64, window=8)", "tova(budget=64)")


def lines():
    return [
        {"task": "niah", "item": f"{length} {depth}", "method": method, "score": depth / 100, "length": length,
         "depth": depth, "prompt_hash": "x"}
        for method in METHODS for length in (512, 1024, 2048) for depth in (0.0, 50.0, 100.0)
    ]  # fmt: skip


def test_svg_names_every_method_length_and_depth(tmp_path):
    pytest.importorskip("matplotlib").rcParams["svg.fonttype"] = "none"  # text stays text
    path = draw_heat_maps(lines(), tmp_path / "niah.svg")
    text = " ".join(ElementTree.parse(path).getroot().itertext())
    for wanted in ("fullkv", "snapkv", "h2o", "tova", "512", "1024", "2048", "prompt length", "depth"):
        assert wanted in text
    assert len(re.findall("<image", path.read_text())) == len(METHODS) + 1  # and the colour bar


def test_png_is_an_image_that_shows_the_scores(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    low, high = (
        imread(draw_heat_maps([{**line, "score": score} for line in lines()], tmp_path / f"{score}.png"))
        for score in (0.0, 1.0)
    )
    assert low.shape == high.shape and min(low.shape[:2]) > 200
    assert (abs(low - high).max(axis=2) > 0.2).mean() > 0.2  # the maps, not the axes


def test_nothing_to_draw(tmp_path):
    pytest.importorskip("matplotlib")
    assert draw_heat_maps([{"task": "vt", "item": "a", "method": "fullkv", "score": 1.0}], tmp_path / "x.png") is None
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_it_is_refused_by_the_extras_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"kvfoundry\[plot\]"):
        require_matplotlib()
