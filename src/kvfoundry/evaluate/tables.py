"""Tables as text: CSV for machines, Markdown for pages."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any


def to_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Figures as they are; None is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if value is None else value for value in row] for row in rows)
    return out.getvalue()


def to_markdown(header: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[int] = (0,)) -> str:
    """texts: numbers of the columns that are set left; the others are figures."""
    rules = ("---" if number in texts else "---:" for number in range(len(header)))
    lines = [f"| {' | '.join(header)} |", f"|{'|'.join(rules)}|"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"
