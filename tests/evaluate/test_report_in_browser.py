"""The report in a real browser: it sorts, filters and shades, fits a phone, and complains of nothing."""

import pytest
from browser import NAMES, Browser, executable
from made import line, lines, run_of
from test_report import HOSTILE, hostile_run

from kvfoundry.evaluate.board import MIB
from kvfoundry.evaluate.compare import compare_runs
from kvfoundry.evaluate.report import render_comparison, render_report

METHODS = {"fullkv": (4, 1.0), "snapkv(budget=8)": (1, 0.75), "h2o(budget=8)": (2, 0.25), "h2o(budget=16)": (3, 0.5)}
WORDS = [f"w{number} " for number in range(20)]


@pytest.fixture(scope="module")
def browser():
    program = executable()
    if program is None:
        pytest.skip(f"no browser here: none of {', '.join(NAMES)} is on the path")
    with Browser(program) as running:
        yield running


def sample():
    """Four items under four methods, one arm without a time, prompts with a gap; snapkv kept tokens 0 and 16 to 19."""
    results = []
    for method, (size, score) in METHODS.items():
        right = round(4 * score)
        for number, one in enumerate(lines(method, [1.0] * right + [0.0] * (4 - right), stored_bytes=size * MIB)):
            one |= {"length": 512 * (1 + number % 2), "depth": 50.0 * (number // 2), "prompt_tokens": 20}
            if method == "snapkv(budget=8)":
                one |= {"kept_profile": "9" + "0" * 15 + "5555", "kept_share": 0.2}
            if method == "h2o(budget=8)":
                one |= {"ms_per_token": None}
            results.append(one)
    ends = {"head": "".join(WORDS[:5]), "head_sizes": [3] * 5, "tail": "".join(WORDS[14:]), "tail_sizes": [4] * 6}
    prompts = tuple({"task": "niah", "item": f"i{number}", "prompt_tokens": 20, **ends} for number in range(4))
    return run_of(*results, prompts=prompts, methods=list(METHODS))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "a report #1.html"
    path.write_text(render_report(sample()))
    return path


@pytest.fixture
def opened(browser, page):
    """Open the page; what the browser complained of by the end of the test fails it."""
    browser.complaints.clear()

    def open_page(fragment="", **size):
        browser.open(page, fragment, **size)
        return browser

    yield open_page
    assert browser.complaints == []


def methods(browser):
    return browser.read("[...document.querySelectorAll('#board tbody th')].map((cell) => cell.dataset.v)")


def order(browser, column):
    return browser.read(f"document.querySelector('[data-column={column}]').parentElement.getAttribute('aria-sort')")


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_reaches_over_the_side(opened, width):
    browser = opened(width=width)
    assert browser.read("innerWidth") == width
    assert browser.read("document.documentElement.scrollWidth") <= width
    wide = browser.read(
        "[...document.querySelectorAll('main *')].filter((element) => !element.closest('.scroll, svg, figure, select')"
        f" && element.getBoundingClientRect().right > {width} + 0.5).map((element) => element.outerHTML.slice(0, 80))"
    )
    assert wide == []
    cut = browser.read(
        "[...document.querySelectorAll('figure')].filter((figure) => figure.scrollWidth > figure.clientWidth).length"
    )
    assert cut == 0
    small = browser.read(
        "[...document.querySelectorAll('svg text')].filter((text) => text.getClientRects().length &&"
        " text.getBoundingClientRect().height < 10).length"
    )
    assert small == 0
    assert browser.read("document.querySelector('#board .scroll').scrollWidth") > 0


def test_sorting_by_mouse(opened):
    browser = opened()
    assert methods(browser) == list(METHODS)
    browser.click("[data-column=score]")
    assert methods(browser) == ["fullkv", "snapkv(budget=8)", "h2o(budget=16)", "h2o(budget=8)"]
    assert order(browser, "score") == "descending"
    browser.click("[data-column=score]")
    assert methods(browser) == ["h2o(budget=8)", "h2o(budget=16)", "snapkv(budget=8)", "fullkv"]
    assert order(browser, "score") == "ascending"
    browser.click("[data-column=stored_bytes]")
    assert methods(browser) == ["snapkv(budget=8)", "h2o(budget=8)", "h2o(budget=16)", "fullkv"]
    assert (order(browser, "score"), order(browser, "stored_bytes")) == ("none", "ascending")
    assert "sort=stored_bytes" in browser.read("location.hash")


def test_sorting_by_keyboard(opened):
    browser = opened()
    browser.read("document.querySelector('[data-column=items]').focus()")
    browser.press("Tab")
    assert browser.read("document.activeElement.dataset.column") == "score"
    browser.press("Enter")
    assert methods(browser)[0] == "fullkv" and order(browser, "score") == "descending"
    browser.press("Space")
    assert methods(browser)[0] == "h2o(budget=8)" and order(browser, "score") == "ascending"


@pytest.mark.parametrize("direction", ["asc", "desc"])
def test_rows_without_a_figure_stay_last(opened, direction):
    browser = opened(f"#sort=ms_per_token&dir={direction}")
    assert methods(browser)[-1] == "h2o(budget=8)"


def test_the_address_decides_the_view(opened):
    browser = opened("#sort=score&dir=asc&method=h2o(budget%3D8)&wrong=1&item=i2")
    assert methods(browser)[0] == "h2o(budget=8)"
    assert browser.read("document.getElementById('count').textContent") == "3 of 16 answers"
    assert browser.read("document.querySelector('#detail h3').textContent") == "niah · i2"
    browser = opened("#sort=nonsense&dir=up&task=none&item=none&show=none")
    assert methods(browser) == list(METHODS)
    assert browser.read("document.getElementById('count').textContent") == "16 of 16 answers"


def test_filters_and_the_choice_of_an_answer(opened):
    browser = opened()
    browser.click("#wrong")
    assert browser.read("document.getElementById('count').textContent") == "6 of 16 answers"
    browser.enter("#by-text", "I3")
    assert browser.read("document.getElementById('count').textContent") == "3 of 16 answers"
    browser.click("#list li:nth-child(2) button")
    assert browser.read("document.querySelector('#detail code').textContent") == "h2o(budget=8)"
    assert browser.read("document.querySelectorAll('#list [aria-pressed=true]').length") == 1
    browser.click("#detail .others button:first-child")
    assert browser.read("document.querySelector('#detail code').textContent") == "fullkv"
    browser.enter("#by-text", "?")
    assert "No answer fits" in browser.read("document.getElementById('detail').textContent")


def test_kept_rows_shade_the_text(opened):
    browser = opened("#item=i0&show=snapkv(budget%3D8)")
    spans = browser.read("[...document.querySelectorAll('.prompt span')].map((e) => [e.className, e.textContent])")
    assert spans == [
        ["k9", "w0 "], ["k0", "w1 w2 w3 w4 "], ["gap", "… 9 tokens are not shown …"],
        ["k0", "w14 w15 "], ["k5", "w16 w17 w18 w19 "],
    ]  # fmt: skip
    assert browser.read("document.querySelector('.strip').width") == 20
    pixels = "[...document.querySelector('.strip').getContext('2d').getImageData(0, 0, 20, 1).data]"
    assert browser.read(f"{pixels}.filter((value, place) => place % 4 == 0)") == [0x78] + [0xF3] * 15 + [0xBC] * 4
    browser.click("#detail .others button:first-child")
    assert "Every row of the prompt was kept." in browser.read("document.getElementById('detail').textContent")
    assert browser.read("document.querySelectorAll('.prompt [class^=k]').length") == 0


def test_texts_of_several_units_are_shaded_by_character(browser, tmp_path):
    prompt = {
        "task": "niah", "item": "i0", "prompt_tokens": 3, "head": "😀a灯", "head_sizes": [1, 1, 1], "tail": "",
        "tail_sizes": [],
    }  # fmt: skip
    path = tmp_path / "page.html"
    path.write_text(render_report(run_of(line("a", "i0", kept_profile="909", prompt_tokens=3), prompts=(prompt,))))
    browser.open(path)
    spans = browser.read("[...document.querySelectorAll('.prompt span')].map((e) => [e.className, e.textContent])")
    assert spans == [["k9", "😀"], ["k0", "a"], ["k9", "灯"]]


def test_references_are_marked_in_the_prompt(browser, tmp_path):
    prompt = {
        "task": "niah", "item": "i0", "prompt_tokens": 3, "head": "a tiger tiger", "head_sizes": [3, 3, 7], "tail": "",
        "tail_sizes": [],
    }  # fmt: skip
    path = tmp_path / "page.html"
    results = [line(name, "i0", kept_profile=profile, prompt_tokens=3) for name, profile in (("a", "090"), ("b", None))]
    path.write_text(render_report(run_of(*results, prompts=(prompt,))))
    spans = "[...document.querySelectorAll('.prompt span')].map((e) => [e.className, e.textContent])"
    browser.open(path)
    assert browser.read(spans) == [
        ["k0", "a "], ["k0 ref", "t"], ["k9 ref", "ige"], ["k0 ref", "r"], ["k0", " "], ["k0 ref", "tiger"],
    ]  # fmt: skip
    browser.open(path, "#item=i0&show=b")
    assert browser.read(spans) == [["", "a "], ["ref", "tiger"], ["", " "], ["ref", "tiger"]]


def test_nothing_of_a_run_is_executed(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(render_report(hostile_run()))
    browser.complaints.clear()
    browser.open(path)
    assert browser.read("typeof window.broken") == "undefined" and browser.complaints == []
    assert browser.read("document.querySelectorAll('img, script').length") == 2
    assert browser.read("document.querySelector('.said').textContent") == HOSTILE
    assert browser.read("document.querySelector('.prompt').textContent") == HOSTILE


def test_comparison_stays_inside_a_phone(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(render_comparison(compare_runs(sample(), sample())))
    browser.complaints.clear()
    browser.open(path, width=390)
    assert browser.read("document.documentElement.scrollWidth") <= 390 and browser.complaints == []
