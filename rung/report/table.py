"""Tables and paragraphs of the reading verbs, as wide as the terminal is, and values as their cells show them.

A table that is too wide first folds its texts at spaces, then leaves out columns from the right, and says which. What
names a row and what came of it stays (`keep`); no word and no number is broken. Without a terminal a table is as wide
as it needs to be, for grep and awk, unless $COLUMNS says otherwise.

What users wrote stays text: a cell holds nothing that a terminal would obey. Numbers are rounded for people; `--json`
has all digits.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from rung.text import echo
from rung.text import one_line as one_line
from rung.text import printable as printable
from rung.units import duration

_COLOURS = {
    "running": "cyan", "finished": "green", "stopped": "yellow", "crashed": "red", "diverged": "red",
    "vanished": "magenta", "silent": "magenta",
}  # fmt: skip
WIDEST = 60  # of a cell that is not the last
NARROWEST = 16  # of a column that is folded
PARAGRAPH = 118  # longer lines are hard to read, however wide the terminal is
_GAP = "  "


class Coloured(str):
    """A cell in a colour of click's."""

    colour: str

    def __new__(cls, text: str, colour: str) -> Coloured:
        made = super().__new__(cls, text)
        made.colour = colour
        return made


def columns() -> int:
    """How many characters a line may have."""
    if (said := os.environ.get("COLUMNS", "")).isdecimal() and int(said) > 0:
        return int(said)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 1_000_000


def paragraph(text: str, first: str = "", rest: str = "  ") -> str:
    """The text in lines that fit, the first one after `first` and the others after `rest`; no word is broken."""
    width = min(columns(), PARAGRAPH)
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def hanging(line: str) -> str:
    """A line such as `  evidence  what was seen` in lines that fit, the others below what was seen."""
    first = re.match(r" *(?:\S+ {2,})?", line)
    assert first is not None
    lead = first[0]
    return paragraph(line[len(lead) :], lead, " " * max(2, len(lead)))


def value_text(value: Any) -> str:
    """A value for a cell: what a person chose as it was chosen, what was measured to four digits."""
    if value is None:
        return "-"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value).replace("nan", "NaN")
        return exact if len(exact := f"{value:.12g}") <= 7 else f"{value:.4g}"
    text = one_line(" ".join(map(str, value)) if isinstance(value, list) else value)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"


def loss_text(loss: Any) -> str:
    """A loss for a narrow column, to the fourth decimal, where losses begin to differ; non-finite as it is."""
    if not isinstance(loss, int | float):
        return "-"
    return f"{loss:.4f}" if math.isfinite(loss) else str(float(loss)).replace("nan", "NaN")


def age(created: Any) -> str:
    try:
        return duration(max(0.0, time.time() - datetime.fromisoformat(str(created)).timestamp()))
    except ValueError:
        return "?"


def print_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Collection[int] = (),
    keep: Collection[int] = (0,),
) -> None:
    """Columns that line up; `numeric` ones to the right, and `keep` are those that a narrow terminal has as well."""
    rows = [[cell if cell.__class__ is Coloured else printable(cell) for cell in row] for row in rows]
    head, num_rows = [printable(name) for name in head], len(rows)
    cells = [[head[i], *(row[i] for row in rows)] for i in range(len(head))]
    kept, widths = _fit(cells, numeric, keep, columns())
    for number in range(num_rows + 1):
        folded = [_fold(cells[i][number], widths[i]) for i in kept]
        for line in range(max(map(len, folded))):
            pieces, before = list[tuple[str, str | None]](), ""
            for i, lines in zip(kept, folded):
                text = lines[line] if line < len(lines) else ""
                padding = " " * (widths[i] - _width(text))
                left, right = (padding, "") if i in numeric else ("", padding)
                cell = cells[i][number]
                colour = cell.colour if isinstance(cell, Coloured) else _COLOURS.get(cell)
                pieces += [(before + left, None), (text, colour if number else None)]
                before = right + _GAP
            _print_line(pieces, is_head=number == 0)
    if left_out := [head[i] for i in range(len(head)) if i not in kept and head[i]]:
        names = ", ".join(left_out[:12]) + (f" and {len(left_out) - 12} more" if len(left_out) > 12 else "")
        echo(paragraph(f"… not shown, as the terminal is too narrow: {names}"))


def _print_line(pieces: Sequence[tuple[str, str | None]], is_head: bool) -> None:
    text = "".join(text for text, _ in pieces).rstrip()
    if is_head or not sys.stdout.isatty() or not any(colour for _, colour in pieces):
        echo(text, bold=True if is_head else None)
        return
    for text, colour in pieces:
        echo(text, nl=False, fg=colour)
    echo()


def _fit(
    cells: Sequence[Sequence[str]], numeric: Collection[int], keep: Collection[int], width: int
) -> tuple[list[int], list[int]]:
    """Which columns are shown, and the width of each column."""
    widths = [max(map(_width, column)) for column in cells]
    # A text is folded to its longest word at most; a word of the last column may stand over the edge.
    least = list(widths)
    for i, column in enumerate(cells):
        if i not in numeric:
            words = [_width(word) for text in column for word in text.split()] if i + 1 < len(cells) else []
            least[i] = min(widths[i], max([NARROWEST, *words]))
    shown = list(range(len(cells)))

    def excess(some: Sequence[int]) -> int:
        return sum(some[i] for i in shown) + len(_GAP) * (len(shown) - 1) - width

    while excess(least) > 0 and (droppable := [i for i in shown if i not in keep]):
        shown.remove(droppable[-1])
    while excess(widths) > 0 and (foldable := [i for i in shown if widths[i] > least[i]]):
        widths[min(foldable, key=lambda i: (i in keep, -widths[i]))] -= 1  # what names a row is folded last
    return shown, widths


def _fold(text: str, width: int) -> list[str]:
    if _width(text) <= width:
        return [text]
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and _width(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _width(text: str) -> int:
    """In columns: of Chinese, Japanese and Korean each sign takes two, and an accent none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
