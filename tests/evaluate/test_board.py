"""The board: figures by hand, the front, the columns, the order, and what is written of it."""

import csv
import io

import pytest
from made import line, lines

from kvfoundry.errors import DataError
from kvfoundry.evaluate.board import MIB, board_csv, board_markdown, board_of, columns_of, pick_columns, sort_rows
from kvfoundry.evaluate.recipes import split_budget


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("fullkv", ("fullkv", None)),
        ("snapkv(budget=64)", ("snapkv", 64)),
        ("snapkv(budget=0.25, window=8)", ("snapkv(window=8)", 0.25)),
        ("headkv(table='t', budget=64)", ("headkv(table='t')", 64)),
        ("h2o(budget=1.0)+kivi(bits=2)", ("h2o+kivi(bits=2)", 1.0)),
        ("h2o(budget=64)+quest(budget=32)", ("h2o(budget=64)+quest(budget=32)", None)),
        ("kivi(bits=2)", ("kivi(bits=2)", None)),
    ],
)
def test_recipe_and_budget(spec, parts):
    found = split_budget(spec)
    assert found == parts and type(found[1]) is type(parts[1])


def several():
    return [
        *lines("fullkv", [1.0, 1.0], "a"), *lines("fullkv", [0.5], "b"),
        *lines("h2o(budget=8)", [1.0, 0.0], "a", stored_bytes=MIB),
        *lines("h2o(budget=8)", [0.5], "b", stored_bytes=MIB),
        *lines("tova(budget=8)", [0.5, 0.5], "a", stored_bytes=2 * MIB, ms_per_token=5.0),
    ]  # fmt: skip


def test_figures_by_hand():
    full, h2o, tova = board_of(several())
    assert full["score"] == 0.75 and full["score:a"] == 1.0 and full["score:b"] == 0.5 and full["difference"] is None
    assert h2o["score"] == 0.5 and h2o["items"] == 3 and h2o["difference"] == pytest.approx(-0.25)
    assert h2o["stored_share"] == 0.25 and h2o["stored_bytes"] == MIB and h2o["verdict"] == "noise"
    # not measured on b: no mean, but its own task
    assert tova["score"] is None and tova["score:a"] == 0.5 and tova["score:b"] is None and tova["ms_per_token"] == 5.0


def test_failed_items_are_counted_and_in_no_mean():
    failed = line(depth=50.0, score=None, exact=None, stored_bytes=None, prediction=None, error="RuntimeError: no")
    (row,) = board_of([line(), failed])
    assert (row["items"], row["failed"], row["score"]) == (1, 1, 1.0)
    assert "1 (+1 failed)" in board_markdown([row], columns_of([line()]))


def test_front_by_hand():
    points = {
        "fullkv": (4, 1.0),
        "a": (1, 0.5),
        "b": (1, 0.4),
        "c": (2, 0.5),
        "d": (2, 0.8),
        "e": (2, 0.8),
        "f": (8, 1),
    }
    results = [line(name, "i", stored_bytes=size * MIB, score=score) for name, (size, score) in points.items()]
    assert {row["method"] for row in board_of(results) if row["front"]} == {"fullkv", "a", "d", "e"}


def test_columns_by_name():
    known = columns_of(several())
    names = [column.name for column in known]
    assert names[:3] == ["method", "items", "score"] and names[-2:] == ["score:a", "score:b"]
    assert [column.name for column in pick_columns(known, ["score", "method"])] == ["score", "method"]
    assert pick_columns(known, []) == known
    with pytest.raises(DataError, match="unknown column 'scores'; did you mean 'score'"):
        pick_columns(known, ["scores"])
    parking = {column.name for column in columns_of([line(), line("snapkv(budget=8)+park()", parked_bytes=MIB)])}
    assert "parked_bytes" in parking and "parked_bytes" not in names
    assert not any(name.startswith("score:") for name in [column.name for column in columns_of([line()])])


def test_order_puts_the_best_first_and_what_is_unknown_last():
    rows = board_of(several())
    columns = {column.name: column for column in columns_of(several())}
    ordered = {name: [row["method"] for row in sort_rows(rows, columns[name])] for name in ("score", "stored_bytes")}
    assert ordered["score"] == ["fullkv", "h2o(budget=8)", "tova(budget=8)"]
    assert ordered["stored_bytes"] == ["h2o(budget=8)", "fullkv", "tova(budget=8)"]  # of tova, only one task is known


def test_csv_has_the_figures_as_they_are():
    rows, columns = board_of(several()), columns_of(several())
    read = list(csv.DictReader(io.StringIO(board_csv(rows, columns))))
    assert [row["method"] for row in read] == ["fullkv", "h2o(budget=8)", "tova(budget=8)"]
    assert float(read[1]["stored_bytes"]) == MIB and float(read[1]["score"]) == 0.5 and read[2]["score"] == ""


def test_markdown_is_a_table():
    text = board_markdown(board_of([line("a|b", "i")]), pick_columns(columns_of([line()]), ["method", "stored_bytes"]))
    assert text == "| method | stored MiB |\n|---|---:|\n| `a\\|b` | 2.00 |\n"
