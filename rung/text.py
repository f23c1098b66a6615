"""Text of users, on its way to a terminal or a page: what would steer the reader's eye or cursor becomes a sign.

Everything that a verb prints goes through `echo`, `write` or `echo_json`, so that no reader has to remember it.
"""

from __future__ import annotations

import re
from typing import Any, TextIO

_SIGNS = {
    **{i: chr(0x2400 + i) for i in range(32) if chr(i) not in "\n\t"},
    0x7F: "\u2421",
    **{i: "\ufffd" for i in (*range(0x80, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF)},
    **{i: f"[U+{i:04X}]" for i in (0x200E, 0x200F, 0x061C, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF)},
}
_MOST_IN_A_LINE = 20_000
_ESCAPED_IN_JSON = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff]")
_LINE_ENDS = re.compile("\r\n|[\r\v\f\x85\u2028\u2029]")


def visible(text: str) -> str:
    """The text with one kind of line end, and a sign for every character that a terminal or a browser would obey."""
    return _LINE_ENDS.sub("\n", text).translate(_SIGNS)


def one_line(value: Any) -> str:
    """Visible text without line ends and extra spaces."""
    return " ".join(visible(str(value)).split())


def printable(text: str) -> str:
    """Visible text that stays in its line, with its spaces."""
    return visible(text).replace("\n", "\u240a").replace("\t", "\u2409")


def echo(text: Any = "", *, err: bool = False, nl: bool = True, **style: Any) -> None:
    """Prints visible text to a person; `style` is that of click. Of an endless line the rest is only counted."""
    import click

    shown = visible(str(text))
    if len(shown) > _MOST_IN_A_LINE:
        shown = "\n".join(map(_cut, shown.split("\n")))
    click.secho(shown, err=err, nl=nl, **style)


def _cut(line: str) -> str:
    more = len(line) - _MOST_IN_A_LINE
    return line if more <= 0 else f"{line[:_MOST_IN_A_LINE]}... ({more} more characters)"


def write(file: TextIO, text: str) -> None:
    """Writes visible text to a stream: a page, CSV."""
    file.write(visible(text))


def echo_json(data: bytes | str, *, nl: bool = True) -> None:
    """Prints JSON: the same values, with what a terminal would obey as \\uXXXX."""
    import click

    written = data.decode() if isinstance(data, bytes) else data
    click.echo(_ESCAPED_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", written), nl=nl)


def error_text(error: BaseException) -> str:
    """The kind of an exception and what it says, on one line; where it says nothing, the place it was raised at."""
    said = one_line(error)
    if said:
        return f"{type(error).__name__}: {said if len(said) <= 4000 else said[:4000] + '...'}"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return f"{type(error).__name__} without a message"
    code = trace.tb_frame.f_code
    return one_line(f"{type(error).__name__} without a message, raised in {code.co_filename}, line {trace.tb_lineno}")
