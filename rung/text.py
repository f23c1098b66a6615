"""Text of users, on its way to a terminal or a page: what would steer the reader's eye or cursor becomes a sign."""

from __future__ import annotations

import re
from typing import Any

_SIGNS = {
    **{i: chr(0x2400 + i) for i in range(32) if chr(i) not in "\n\t"},
    0x7F: "\u2421",
    **{i: "\ufffd" for i in (*range(0x80, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF)},
    **{i: f"[U+{i:04X}]" for i in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF)},
}
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
