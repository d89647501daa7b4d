"""The board as a table whose headings are buttons; `page.js` sorts it by the `data-v` of its cells."""

from collections.abc import Sequence
from html import escape

from kvfoundry.evaluate.board import Column, Row

_LEGEND = (
    '<p class="quiet">Scores are means over items, from 0 to 1. <b class="badge">front</b> stands where no other '
    "method stores as little and scores as high. Press a heading to sort.</p>"
)


def breakable(spec: str) -> str:
    """A spec that a narrow column breaks before its parameters and pieces, not inside a word."""
    return escape(spec).replace("(", "(<wbr>").replace("+", "<wbr>+").replace(", ", ", <wbr>")


def board_table(rows: Sequence[Row], columns: Sequence[Column], sort: str | None = None) -> str:
    """The section with the board; sort: name of the column that the rows are in the order of, best first."""
    head = "".join(_heading(column, column.name == sort) for column in columns)
    body = "".join(f"<tr>{''.join(_cell(row, column) for column in columns)}</tr>" for row in rows)
    return (
        f'<section id="board"><h2>Board</h2>{_LEGEND}'
        '<div class="scroll" tabindex="0" role="region" aria-label="board">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _heading(column: Column, orders: bool) -> str:
    label = escape(column.label).replace("_", "_<wbr>")
    order = ("descending" if column.best == "high" else "ascending") if orders else "none"
    return (
        f'<th scope="col" aria-sort="{order}" title="{escape(column.title)}"><button type="button" '
        f'data-column="{escape(column.name)}" data-best="{column.best}">{label}</button></th>'
    )


def _cell(row: Row, column: Column) -> str:
    value = row[column.name]
    key = "" if value is None else f' data-v="{escape(str(value))}"'
    if column.name == "method":
        badge = ' <b class="badge">front</b>' if row["front"] else ""
        return f'<th scope="row"{key}><code>{breakable(row["method"])}</code>{badge}</th>'
    text = escape(column.show(value))
    if column.name == "items" and row["failed"]:
        text += f'<small class="bad">+{row["failed"]} failed</small>'
    elif column.name == "difference" and value is not None:
        verdict = row["verdict"]
        told = f"{row['low']:+.2f} … {row['high']:+.2f}" if verdict in ("better", "worse") else verdict
        return f'<td{key} class="{verdict}" title="{escape(row["reason"])}">{text}<small>{escape(told)}</small></td>'
    elif (column.name == "score" or column.name.startswith("score:")) and value is not None:
        text += f'<span class="bar"><i style="width:{min(max(value, 0), 1):.0%}"></i></span>'
    return f"<td{key}>{text}</td>"
