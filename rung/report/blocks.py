"""A page as a list of blocks, and the same blocks as Markdown that GitHub and any CommonMark reader show alike.

Users' text stays text: it never becomes a heading, a link, a mention, an emoji or HTML. Characters that control a
terminal or the direction of reading are shown as visible signs (`visible`), so a page can be printed with cat;
everything else survives to the letter. html.py renders the same blocks for a browser.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote

from rung.text import one_line, visible


class Span(NamedTuple):
    """A piece of a line; `style` is "", "bold", "struck" or "code", and `link` a path relative to the page."""

    text: str | Sequence[Span]
    style: str = ""
    link: str = ""


Spans = Sequence[Span | str]  # a plain str is a plain span


def bold(*spans: Span | str) -> Span:
    return Span(_spans(spans), "bold")


def struck(*spans: Span | str) -> Span:
    return Span(_spans(spans), "struck")


def code(text: object) -> Span:
    return Span(str(text), "code")


def link(text: str, path: str) -> Span:
    return Span(text, "", path)


def joined(parts: Sequence[Spans], mark: str = ", ") -> list[Span | str]:
    """The parts as one line, with a mark between them."""
    out: list[Span | str] = []
    for i, spans in enumerate(parts):
        out += [*([mark] if i else []), *spans]
    return out


@dataclass
class Heading:
    level: int
    spans: Spans


@dataclass
class Paragraph:
    spans: Spans


@dataclass
class Bullets:
    items: Sequence[Spans]


@dataclass
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[Spans | str]]
    numeric: Sequence[int] = ()  # columns that stand on the right


@dataclass
class Code:
    text: str
    language: str = ""


@dataclass
class Quote:
    """What somebody wrote, line by line."""

    text: str


@dataclass
class Picture:
    """A drawing of ours; HTML takes `svg` in, Markdown points to the file at `path`."""

    path: str
    alt: str
    svg: str


@dataclass
class File:
    """A file of the run, as a sample; HTML takes `data` in where it is not None."""

    path: str
    caption: str = ""
    data: bytes | None = None


Block = Heading | Paragraph | Bullets | Table | Code | Quote | Picture | File


@dataclass
class Page:
    title: str
    blocks: list[Block] = field(default_factory=list)

    @property
    def drawings(self) -> dict[str, str]:
        """What its Markdown points to: file name -> SVG."""
        return {block.path: block.svg for block in self.blocks if isinstance(block, Picture)}


PICTURES = ("png", "jpg", "jpeg", "gif", "svg", "webp")
TEXTS = ("txt", "json", "md", "csv", "abc")  # samples that are read rather than opened


def paragraphs(text: str) -> str:
    """Visible text without blank lines at its ends, and with one at most between its parts."""
    lines = [line if line.strip() else "" for line in visible(text).split("\n")]
    kept = [line for i, line in enumerate(lines) if line or (i and lines[i - 1])]
    return "\n".join(kept).strip("\n")


def markdown(page: Page) -> str:
    """The page, ending in one newline."""
    out = []
    for block in [Heading(1, [page.title]), *page.blocks]:
        match block:
            case Heading(level, spans):
                # Number signs at the end of a heading are taken for its closing.
                text = _CLOSING.sub(lambda match: match[0].replace("#", r"\#"), inline(spans))
                out.append(f"{'#' * level} {text}")
            case Paragraph(spans):
                out.append(inline(spans))
            case Bullets(items):
                out.append("\n".join(f"- {inline(item)}" for item in items))
            case Table(head, rows, numeric):
                marks = ["---:" if i in numeric else "---" for i in range(len(head))]
                spans_of = [[[cell] if isinstance(cell, str) else cell for cell in row] for row in (head, *rows)]
                cells = [[inline(spans, in_table=True) for spans in row] for row in spans_of]
                out.append("\n".join(f"| {' | '.join(line)} |" for line in (cells[0], marks, *cells[1:])))
            case Code(text, language):
                out.append(_fenced(text, language))
            case Quote(text):
                escaped = _EDGES.sub(_entities, _escaped(paragraphs(text)))
                parts = [part.replace("\n", "\\\n") for part in escaped.split("\n\n")]
                out.append("\n".join(f"> {line}" if line else ">" for line in "\n\n".join(parts).split("\n")))
            case Picture(path, alt, _):
                out.append(f"![{inline([one_line(alt)])}]({target(path)})")
            case File(path, caption, data):
                name = one_line(path.rpartition("/")[2])
                kind = name.rpartition(".")[2].lower()
                out.append(f"{'!' if kind in PICTURES else ''}[{inline([name])}]({target(path)})")
                if shown := inline([one_line(caption)]):
                    out[-1] += f"\n\n{shown}" if kind in PICTURES else f": {shown}"
                if kind in TEXTS and data is not None:
                    out.append(_fenced(data.decode("utf-8", "replace")))
    return "\n\n".join(filter(None, out)) + "\n"


def _fenced(text: str, language: str = "") -> str:
    text = visible(text).rstrip("\n")
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def target(path: str) -> str:
    """A relative path as the target of a link."""
    quoted = quote(path.encode("utf-8", "surrogateescape"), safe="/._-~")
    # "a:b" at the start would be read as a scheme.
    return quoted if quoted.startswith((".", "/")) or ":" not in quoted.split("/")[0] else f"./{quoted}"


def inline(spans: Spans, in_table: bool = False) -> str:
    """One line of Markdown."""
    pieces = _spans(spans)
    out = ""
    for i, span in enumerate(pieces):
        before, after = out[-1:], plain_text(pieces[i + 1 :])[:1]
        if span.style == "code":
            text = one_line_spaces(plain_text([span]))
            is_odd = "`" in text or text != text.strip() or (in_table and "|" in text) or "  " in text or "\t" in text
            shown = f"<code>{_escaped(text).replace(_PIPE, '&#124;')}</code>" if is_odd else f"`{text}`"
            out += shown if text else ""
            continue
        if isinstance(span.text, str):
            text = _escaped(one_line_spaces(span.text), at_start=not before and not in_table)
        else:
            text = inline(span.text, in_table)
        if in_table:
            text = text.replace(_PIPE, "&#124;")
        if span.link:
            text = f"[{text}]({target(span.link)})"
        if span.style in ("bold", "struck") and text:
            # Stars and tildes hold only with room outside and none inside; tags always do.
            is_loose = before in _ROOM_BEFORE and after in _ROOM_AFTER and text == text.strip()
            marks, tag = {"bold": ("**", "b"), "struck": ("~~", "del")}[span.style]
            text = f"{marks}{text}{marks}" if is_loose else f"<{tag}>{text}</{tag}>"
        out += text
    return _EDGES.sub(_entities, out)


def one_line_spaces(text: str) -> str:
    """Visible, on one line, with its spaces."""
    return visible(text).replace("\n", " ")


def plain_text(spans: Spans) -> str:
    return "".join(span.text if isinstance(span.text, str) else plain_text(span.text) for span in _spans(spans))


def _spans(spans: Spans) -> list[Span]:
    return [span if isinstance(span, Span) else Span(span) for span in spans]


_PIPE = "\\|"  # as `_escaped` writes it; in a table it would still end the cell
_MARKUP = re.compile(r"[\\`*\[\]<&~|]")
_LONE_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_AT_START = re.compile(r"^(?:[=>]|[-+:](?=[\s:-]|$)|#+(?=\s|$)|[0-9]+(?=[.)](?:\s|$)))", re.M)
_EDGES = re.compile(r"^[^\S\n]+|[^\S\n]+$", re.M)
_CLOSING = re.compile(r"(?<!\\)#+$")
_ROOM_BEFORE, _ROOM_AFTER = ("", " ", "("), ("", " ", ")", ",", ".", ";", ":")
_SCHEME = re.compile(r":(?=//)")
_WWW = re.compile(r"(www)\.", re.I)
# GitHub looks for these in the finished text, where no backslash is left to see; an empty comment parts them.
_MENTION = re.compile(r"(?<=@)(?=[A-Za-z0-9])|(?<=#)(?=[0-9])|(?<=[Gg][Hh]-)(?=[0-9])")
_EMOJI = re.compile(r":(?=[\w+-]*[A-Za-z+-][\w+-]*:)")


def _escaped(text: str, at_start: bool = True) -> str:
    """Visible text as Markdown that shows exactly that text; spaces at the ends of lines are left to `_entities`."""
    text = _MARKUP.sub(lambda match: "\\" + match[0], text)
    text = _LONE_UNDERSCORE.sub(r"\\_", text)
    text = _MENTION.sub("<!-- -->", text)
    text = _SCHEME.sub(r"\\:", text)
    text = _EMOJI.sub(":<!-- -->", text)
    text = _WWW.sub(r"\1\\.", text)
    text = text.replace("$", "<span>$</span>")  # as GitHub's guide has it: no formula begins here
    if at_start:  # else it would begin a block
        text = _AT_START.sub(lambda match: f"{match[0]}\\" if match[0].isdigit() else f"\\{match[0]}", text)
    return text


def _entities(match: re.Match[str]) -> str:
    """Spaces at the end of a line would be taken away, or make a code block or a line break of it."""
    return "".join(f"&#{ord(char)};" for char in match[0])
