"""The report as a text: one offline file, made from a run alone, true to it and closed to what a run may hold."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from made import line, lines, run_of

from kvfoundry.errors import DataError
from kvfoundry.evaluate.board import board_of
from kvfoundry.evaluate.compare import compare_runs
from kvfoundry.evaluate.report import render_comparison, render_report
from kvfoundry.evaluate.report.answers import answers_data, script_json, shown_items
from kvfoundry.evaluate.report.marks import marks_of
from kvfoundry.evaluate.report.plots import curves, heat_map, pareto_plot
from kvfoundry.evaluate.summary import grid, shared_prompts, summarise

HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>&amp;\"\u2028\x00"


class Strict(HTMLParser):
    """Fails on tags that are not closed in order."""

    VOID = frozenset({"meta", "rect", "stop", "br", "wbr", "line", "path", "input", "polyline"})

    def __init__(self):
        super().__init__()
        self.open, self.text, self.tags, self.scripts = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] == "script" else self.text).append(data)


def parsed(html):
    parser = Strict()
    parser.feed(html)
    assert parser.open == []
    return parser


def text_of(html):
    return "".join(parsed(html).text)


def hostile_run():
    prompt = {"task": HOSTILE, "item": HOSTILE, "prompt_tokens": 1, "head": HOSTILE, "head_sizes": None, "tail": ""}
    texts = dict(task=HOSTILE, prediction=HOSTILE, references=[HOSTILE], notes=[HOSTILE])
    results = [
        line("fullkv", HOSTILE, **texts),
        line(f"x(name='{HOSTILE}', budget=8)", HOSTILE, **texts),
        line(f"x(name='{HOSTILE}', budget=9)", HOSTILE, **{**texts, "score": None, "error": HOSTILE}),
    ]
    return run_of(*results, prompts=(prompt,), model=HOSTILE)


def test_page_is_well_formed_and_fetches_nothing():
    page = render_report(run_of(line(), line("h2o(budget=8)", depth=50.0, score=0.25)))
    found = parsed(page)
    assert not re.search(r"https?:|<link|<img|<iframe|url\((?!#)|@import", page)
    assert not any("src" in attributes or "href" in attributes for _, attributes in found.tags)


def test_nothing_of_a_run_becomes_markup():
    page = render_report(hostile_run())
    found = parsed(page)
    assert [tag for tag, _ in found.tags if tag in ("script", "img")] == ["script", "script"]
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    data = json.loads(found.scripts[0])
    assert data["answers"][0]["text"] == HOSTILE and data["prompts"][0]["head"] == HOSTILE
    assert data["answers"][2]["error"] == HOSTILE and data["prompts"][0]["references"] == [HOSTILE]


def test_the_policy_lets_only_this_script_run():
    page = render_report(run_of(line()))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1)
    code = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(code) == 1 and "default-src 'none'" in policy
    digest = base64.b64encode(hashlib.sha256(code[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "script-src 'none'" in render_comparison(compare_runs(run_of(line()), run_of(line())))


def test_data_in_a_script_is_what_it_was():
    assert json.loads(script_json({"a": HOSTILE})) == {"a": HOSTILE}
    assert not set("<>&\u2028\u2029") & set(script_json({"a": HOSTILE}))


def test_half_a_surrogate_pair_does_not_stop_the_page():
    render_report(run_of(line(prediction="\ud83d"))).encode()


def test_numbers_of_the_board():
    results = [*lines("fullkv", [1.0, 0.5]), *lines("h2o(budget=8)", [0.0, 0.5])]
    text = text_of(render_report(run_of(*results)))
    for shown in ("0.750", "0.250", "-0.500", "noise", "2.00", "50.0%", "64", "12.5", "front"):
        assert shown in text


def test_columns_and_order():
    run = run_of(*lines("fullkv", [0.5]), *lines("h2o(budget=8)", [1.0]))
    page = render_report(run, ["method", "kept_share"], "score")
    assert re.findall(r'data-column="(\w+)"', page) == ["method", "kept_share"]
    assert re.findall(r'<th scope="row" data-v="([^"]*)"', page) == ["h2o(budget=8)", "fullkv"]
    assert set(re.findall(r'col" aria-sort="(\w+)"', page)) == {"none"}  # the column of the order is not shown
    assert 'col" aria-sort="ascending"' in render_report(run, sort="stored_bytes")
    for wrong in (dict(columns=["kept"]), dict(sort="kept")):
        with pytest.raises(DataError, match="unknown column 'kept'; did you mean 'kept_"):
            render_report(run, **wrong)


def test_guards_failures_and_what_is_missing_are_on_the_page():
    failed = line("h2o(budget=8)", depth=50.0, score=None, prediction=None, error="RuntimeError: <no>")
    prompts = ({"task": "niah", "item": "a", "head": "", "tail": "", "prompt_tokens": 1},) * 3
    text = text_of(render_report(run_of(line(score=0.0), failed, prompts=prompts, methods=["fullkv", "h2o(budget=8)"])))
    assert "RuntimeError: <no>" in text and "in no average: 1" in text
    assert "the full cache itself scores 0.00" in text and "Unfinished: 4 answers" in text
    quiet = text_of(render_report(run_of(line())))
    assert "No guard was tripped" in quiet and "Unfinished" not in quiet
    only = summarise([failed])[0]
    assert only["score"] is None and only["items"] == 0
    parsed(render_report(run_of(failed)))


def test_different_prompts_are_called_out():
    same, other = [line(), line("h2o")], [line(), line("h2o", prompt_hash="else")]
    assert shared_prompts(same) and not shared_prompts(other)
    assert "do not compare" in render_report(run_of(*other))
    assert "do not compare" not in render_report(run_of(*same))


def test_plots_stand_where_there_is_something_to_plot():
    run = run_of(*lines("fullkv", [1.0]), *lines("h2o(budget=8)", [0.5]), *lines("h2o(budget=16)", [0.75]))
    page = render_report(run)
    assert 'id="pareto"' in page and 'id="curves"' in page and 'id="needles"' in page
    bare = [{name: value for name, value in one.items() if name != "depth"} for one in lines("h2o(budget=8)", [0.5])]
    page = render_report(run_of(*bare))
    assert 'id="curves"' not in page and 'id="needles"' not in page


def test_the_front_is_filled_and_all_points_lie_inside():
    sizes = {"fullkv": (8, 1.0), "h2o(budget=8)": (1, 0.5), "h2o(budget=9)": (2, 0.4)}
    rows = board_of([line(name, "i", stored_bytes=size << 20, score=score) for name, (size, score) in sizes.items()])
    for width in (326, 1160):
        svg = pareto_plot(rows, marks_of(["fullkv", "h2o"]), width)
        assert svg.count('fill="#ffffff"') == 1 and 'class="front"' in svg
        assert all(46 <= float(x) <= width - 14 for x in re.findall(r'c?x="([\d.]+)" c?y="[\d.]+" r="', svg))
    assert pareto_plot([{**row, "stored_bytes": 0} for row in rows], marks_of(["fullkv", "h2o"]), 326) == ""


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (6.1, 8.5), (0.001, 900.0)])
def test_axes_name_at_least_one_size(low, high):
    rows = board_of([line("a", stored_bytes=int(low * (1 << 20))), line("b", stored_bytes=int(high * (1 << 20)))])
    for width, most in ((326, 5), (1160, 8)):
        ticks = pareto_plot(rows, marks_of(["a", "b"]), width).count('class="tick"')
        assert 1 <= ticks <= most


def test_curves_by_rows_and_by_shares():
    marks = marks_of(["h2o"])
    rows = curves({"h2o": [(64, 0.5), (128, 1.0)]}, 1.0, marks, shares=False)
    assert ">64<" in rows and ">128<" in rows and 'class="full"' in rows
    shares = curves({"h2o": [(0.25, 0.1), (0.5, 0.2)]}, None, marks, shares=True)
    assert ">25%<" in shares and 'class="full"' not in shares and ">0.2<" in shares


def test_marks_tell_recipes_apart():
    families = ["fullkv", *(f"m{number}" for number in range(20))]
    assert len(set(marks_of(families).values())) == 21


def test_heat_map_has_every_cell_and_blanks():
    svg = heat_map({(0.0, 128): 1.0, (50.0, 128): 0.25, (0.0, 256): 0.0})
    assert [">1.00<" in svg, ">0.25<" in svg, ">0.00<" in svg] == [True] * 3
    assert svg.count('fill="none"') == 1


def test_grid_is_a_mean_per_cell():
    assert grid([line(score=1.0), line(score=0.0), line(depth=50.0, score=1.0)]) == {(0.0, 128): 0.5, (50.0, 128): 1.0}


@pytest.mark.parametrize("columns", [1, 2, 8])
def test_heat_map_width_holds_its_columns(columns):
    svg = heat_map({(0.0, 128 * number): 1.0 for number in range(1, columns + 1)})
    width = int(re.search(r'width="(\d+)" height', svg).group(1))
    rights = [float(x) + float(w) for x, w in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', svg)]
    assert len(rights) == columns and max(rights) <= width


def test_a_large_run_shows_an_even_spread_of_its_items():
    run = run_of(*lines("a", [1.0] * 100), *lines("b", [1.0] * 100))
    items = shown_items(run, most=20)
    assert [item for _, item in items] == [f"i{number}" for number in range(0, 100, 10)]
    data = answers_data(run, items)
    assert len(data["prompts"]) == 10 and len(data["answers"]) == 20 and None not in data["prompts"]
    assert len(shown_items(run)) == 100


def test_comparison_page():
    first = run_of(*lines("fullkv", [1.0] * 8), *lines("<i>", [1.0] * 8))
    second = run_of(*lines("fullkv", [0.0] * 8), *lines("<i>", [1.0] * 8), model="<b>")
    text = text_of(render_comparison(compare_runs(first, second)))
    for shown in ("<i>", "worse", "equal", "-1.000", "model is tiny in A and <b> in B."):
        assert shown in text
