"""The report: one offline file, made from lines alone, true to them."""

import re
from html.parser import HTMLParser

import pytest

from kvfoundry.evaluate.report import MIB, heat_map, render_report
from kvfoundry.evaluate.summary import grid, shared_prompts, summarise


def line(method="fullkv", depth=0.0, length=128, score=1.0, **more):
    return {
        "task": "niah", "item": f"L{length}-D{depth}", "method": method, "seed": 0, "length": length, "depth": depth,
        "score": score, "exact": score == 1.0, "stored_bytes": 2 * MIB, "peak_bytes": 3 * MIB, "full_bytes": 4 * MIB,
        "kept_rows": 64.0, "kept_share": 0.5, "prompt_tokens": length, "ttft_seconds": 0.5, "ms_per_token": 12.5,
        "seconds": 1.0, "notes": [],
        "prompt_hash": f"{length}{depth}",
    } | more  # fmt: skip


class Strict(HTMLParser):
    """Fails on tags that are not closed in order."""

    VOID = frozenset({"meta", "rect", "stop", "br", "wbr"})

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(html):
    parser = Strict()
    parser.feed(html)
    assert parser.open == []
    return "".join(parser.text)


def test_page_is_well_formed_offline_and_escaped():
    html = render_report([line(), line('x(name="<b>")', depth=50.0, score=0.25, notes=["nothing to <drop>"])])
    text = parsed(html)
    assert 'x(name="<b>")' in text and "nothing to <drop>" in text
    assert not re.search(r"https?:|<script|<link|<img|url\((?!#)", html)


def test_numbers_of_the_table():
    text = parsed(render_report([line(score=1.0), line(depth=50.0, score=0.5)]))
    for shown in ("0.75", "0.50", "2.00", "50.0%", "64", "12.5"):
        assert shown in text


def test_heat_map_has_every_cell_and_blanks():
    svg = heat_map({(0.0, 128): 1.0, (50.0, 128): 0.25, (0.0, 256): 0.0})
    assert [">1.00<" in svg, ">0.25<" in svg, ">0.00<" in svg] == [True] * 3
    assert svg.count('fill="none"') == 1


def test_failed_items_are_shown_and_in_no_average():
    failed = line(depth=50.0, score=None, exact=None, stored_bytes=None, seconds=None, error="RuntimeError: <no>")
    rows = summarise([line(), failed])
    assert (rows[0]["items"], rows[0]["failed"], rows[0]["score"]) == (1, 1, 1.0)
    assert "RuntimeError: <no>" in parsed(render_report([line(), failed]))
    only = summarise([failed])[0]
    assert only["score"] is None and only["items"] == 0
    parsed(render_report([failed]))


def test_different_prompts_are_called_out():
    same, other = [line(), line("h2o")], [line(), line("h2o", prompt_hash="else")]
    assert shared_prompts(same) and not shared_prompts(other)
    assert "do not compare" in render_report(other)
    assert "do not compare" not in render_report(same)


def test_grid_is_a_mean_per_cell():
    assert grid([line(score=1.0), line(score=0.0), line(depth=50.0, score=1.0)]) == {(0.0, 128): 0.5, (50.0, 128): 1.0}


@pytest.mark.parametrize("columns", [1, 2, 8])
def test_heat_map_width_holds_its_columns(columns):
    svg = heat_map({(0.0, 128 * number): 1.0 for number in range(1, columns + 1)})
    width = int(re.search(r'width="(\d+)" height', svg).group(1))
    rights = [float(x) + float(w) for x, w in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', svg)]
    assert len(rights) == columns and max(rights) <= width
