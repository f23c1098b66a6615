"""Tables of the reading verbs, and values as their cells show them: rich on a terminal, plain text elsewhere.

What users wrote stays text: a cell is one line, and holds nothing that a terminal would obey.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from rung.text import echo
from rung.text import one_line as one_line
from rung.text import printable as printable
from rung.units import duration

_COLOURS = {
    "running": "cyan", "finished": "green", "stopped": "yellow", "crashed": "red", "diverged": "red",
    "vanished": "magenta", "silent": "magenta",
}  # fmt: skip
WIDEST = 60  # of a cell that is not the last


def value_text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else str(value).replace("nan", "NaN")
    text = one_line(" ".join(map(str, value)) if isinstance(value, list) else value)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def loss_text(loss: Any) -> str:
    """A loss for a narrow column; non-finite is shown as it is."""
    if not isinstance(loss, int | float):
        return "-"
    return f"{loss:.4f}" if math.isfinite(loss) else str(float(loss)).replace("nan", "NaN")


def age(created: Any) -> str:
    try:
        return duration(max(0.0, time.time() - datetime.fromisoformat(str(created)).timestamp()))
    except ValueError:
        return "?"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> None:
    """Columns that line up: rich on a terminal, plain text for everything else."""
    head, rows = [printable(name) for name in head], [[printable(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(head, *rows)]
        for row in [head, *rows]:
            cells = [f"{text:{'>' if i in numeric else '<'}{widths[i]}}" for i, text in enumerate(row)]
            echo("  ".join(cells).rstrip())
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(head):
        # A narrow terminal folds a number; cutting it would show another one.
        justify: Literal["left", "right"] = "right" if i in numeric else "left"
        may_wrap = i in numeric or i == len(head) - 1
        table.add_column(name, justify=justify, no_wrap=not may_wrap, overflow="fold")
    for row in rows:
        table.add_row(*[Text(cell, style=_COLOURS.get(cell, "")) for cell in row])
    Console().print(table)
