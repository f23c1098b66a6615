"""If this fails, what somebody wrote in a note becomes a heading, a link or HTML on a page, or loses a letter there."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from rung.report.blocks import (
    Block,
    Bullets,
    Code,
    File,
    Heading,
    Page,
    Paragraph,
    Picture,
    Quote,
    Span,
    Table,
    bold,
    code,
    link,
    markdown,
    one_line_spaces,
    paragraphs,
    struck,
    target,
)
from rung.report.html import LARGEST_BYTES, to_html
from rung.text import one_line, visible

# Pieces that mean something to a Markdown reader, to GitHub, to a browser or to a terminal.
PIECES = [
    *"\\`*_{}[]()#+-.!|~<>&$:=@\"'\n\t ", "\n\n", "    ", "---", "===", "```", "~~~", "**", "__", "1. ", "- ", "> ",
    "# ",
    "[a](b)", "![a](b)", "<b>", "</b>", "<!--", "-->", "<script>alert(1)</script>", "&amp;", "&#65;", "http://a.b/c",
    "www.a.de", "a@b.de", "@bob", "#12", "GH-7", ":tada:", ":-", "| - | - |", "$x$", "\x1b[31m", "\x00", "\u202e",
    "\ud800",
    "\r\n", "\u2028", "ü", "日本", "🎹", "[ ] ", "[!NOTE]", "[^1]", "<https://a.b>", "word", "7", "\\|", "a|b",
]  # fmt: skip
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


class Seen(HTMLParser):
    """Tags and text of an HTML page, as a browser would show it."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.links: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag == "br":
            self.handle_data("\n")
        elif tag not in ("img", "meta", "rect", "path"):
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in ("br", "img"):
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in dict.fromkeys(self._open):
            self.texts[tag][-1] += data


def read(block: Block) -> Seen:
    """What a reader sees of one block after its heading."""
    text = markdown(Page("page", [block]))
    _check_for_github(text)
    return Seen(READER.render(text).replace("<br />\n", "<br />").replace("</p>\n<p>", "\n\n"))


def _check_for_github(text: str) -> None:
    """GitHub adds links of its own; outside of code none of what it looks for may be left."""
    outside = re.sub(r"(?<!\\)(`+).*?\1", "", text, flags=re.S)
    # One column is a table to it, also without a bar; it looks for tables before it reads entities.
    assert not re.search(r"^> *:?-+:? *\\?$", outside, re.M)
    outside = re.sub(r"&#([0-9]+);", lambda match: chr(int(match[1])), outside)
    assert not re.search(r"(?<!\\):(?=//)", outside)
    assert not re.search(r"www\.", outside, re.I)
    assert not re.search(r"@[A-Za-z0-9]|#[0-9]|(?i:gh)-[0-9]|:[a-z]+:", outside)


def shown(text: str) -> Seen:
    return Seen(to_html(Page("page", [Quote(text)])))


@given(TEXTS)
@example("a\n:-")
@example("a\n-:")
@example("a\n -")
@example("# x\n\n- y\n=")
@example("\xa0x\xa0\n\u3000")
def test_a_quote_shows_the_text_and_nothing_else(text: str) -> None:
    seen = read(Quote(text))
    assert set(seen.tags) <= {"h1", "blockquote", "p", "br", "span"}
    if paragraphs(text):
        assert "".join(seen.texts["blockquote"]).strip("\n") == paragraphs(text)
    in_html = shown(text)
    assert in_html.texts["blockquote"] == [paragraphs(text)]
    assert in_html.tags[-3:] == ["main", "h1", "blockquote"]


@given(TEXTS)
@example(":a|:")
@example("#")
@example("a ##")
def test_a_line_shows_the_text_in_any_place(text: str) -> None:
    line = one_line_spaces(text)
    places: dict[str, Block] = {
        "p": Paragraph([text]),
        "li": Bullets([[text]]),
        "h2": Heading(2, [text]),
        "td": Table(["x"], [[text]]),
        "th": Table([text], [["x"]]),
        "strong": Paragraph(["so ", bold(text), " it is"]),
        "s": Bullets([[struck(text)]]),
    }
    for tag, block in places.items():
        seen = read(block)
        tag = {"strong": "b", "s": "del"}.get(tag, tag) if tag not in seen.texts else tag
        if line.strip():
            found = seen.texts[tag][0]
            assert (found.strip() if tag == "th" else found) == (line.strip() if tag == "th" else line), (tag, block)
        assert not {"a", "img", "code", "em", "hr", "script", "blockquote", "pre"} & set(seen.tags)
        in_html = Seen(to_html(Page("page", [block])))
        assert not {"a", "img", "code", "script"} & set(in_html.tags)


@given(TEXTS, st.booleans())
def test_inline_code_shows_the_text(text: str, is_in_table: bool) -> None:
    seen = read(Table(["x"], [[[code(text)]]]) if is_in_table else Paragraph(["a ", code(text), " b"]))
    line = one_line_spaces(text)
    if line:
        assert seen.texts["code"] == [line]
    assert Seen(to_html(Page("p", [Paragraph([code(text)])]))).texts.get("code", [""]) == [line]


@given(TEXTS, TEXTS)
def test_a_block_of_code_ends_where_it_should(text: str, after: str) -> None:
    parsed = READER.parse(markdown(Page("page", [Code(text, "bash"), Quote(after)])))
    fences = [token for token in parsed if token.type == "fence"]
    assert len(fences) == 1
    assert fences[0].content.removesuffix("\n") == visible(text).rstrip("\n")
    assert fences[0].info == "bash"


@given(st.lists(st.lists(TEXTS, min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_table_keeps_its_cells(rows: list[list[str]]) -> None:
    seen = read(Table(["a", "b", "c"], rows, numeric=(2,)))
    assert [cell.strip() for cell in seen.texts["td"]] == [one_line_spaces(c).strip() for row in rows for c in row]


@given(TEXTS)
def test_what_steers_a_terminal_is_made_visible(text: str) -> None:
    page = markdown(Page(text, [Quote(text), Code(text), Paragraph([text, code(text)]), Table([text], [[text]])]))
    page.encode()
    assert all(c in "\n\t" or ord(c) >= 32 for c in page)
    assert not re.search("[\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page)


@given(st.text(alphabet=st.characters(blacklist_characters="/\x00", blacklist_categories=["Cs"]), min_size=1))
def test_a_link_leads_to_the_file(name: str) -> None:
    from urllib.parse import unquote

    page = markdown(Page("p", [Paragraph([link("to it", f"samples/{name}")])]))
    seen = Seen(READER.render(page))
    assert [unquote(href) for href in seen.links] == [f"samples/{name}"]
    assert not target(name).startswith("javascript:")


def test_the_form_of_a_page_of_settings() -> None:
    """As people write it by hand."""
    items = [
        [struck("smaller model ", code("large"), " → ", code("medium"))],
        [bold("batch size ", code("8"), " → ", code("4")), " and more"],
        [Span("load in 8bit")],
    ]
    assert markdown(Page("attempt 13", [Bullets(items)])) == (
        "# attempt 13\n\n- ~~smaller model `large` → `medium`~~\n- **batch size `8` → `4`** and more\n- load in 8bit\n"
    )


def test_usual_text_stays_readable_in_the_source() -> None:
    text = "grad_clip 1.0 -> 0.5, see model.py: 3 % (p = 0.04)"
    assert markdown(Page("p", [Paragraph([text])])) == f"# p\n\n{text}\n"


@pytest.mark.parametrize(
    ("name", "tag"), [("a.png", "img"), ("a.wav", "audio"), ("a.mp4", "video"), ("a.txt", "pre"), ("a.mid", "a")]
)
def test_samples_are_taken_in(name: str, tag: str) -> None:
    page = to_html(Page("p", [File(f"samples/{name}", "a <caption>", b"data")]))
    seen = Seen(page)
    assert tag in seen.tags
    assert "a &lt;caption&gt;" in page
    assert all(href.startswith("data:") for href in seen.links)


def test_a_sample_that_is_too_large_is_a_link() -> None:
    for file in (File("samples/a.wav", "x", b"0" * (LARGEST_BYTES + 1)), File("samples/a.wav", "x", None)):
        seen = Seen(to_html(Page("p", [file])))
        assert seen.links == ["samples/a.wav"]
        assert "audio" not in seen.tags
    assert "[a.wav](samples/a.wav): x" in markdown(Page("p", [File("samples/a.wav", "x")]))


def test_html_needs_nothing_else() -> None:
    """No script, and nothing that a browser would fetch; the policy forbids both, should a page ever hold one."""
    blocks = [Picture("loss.svg", "loss", "<svg></svg>"), File("a.png", "", b"x"), Quote("<script src=http://a.b>")]
    page = to_html(Page("<p>", blocks))
    seen = Seen(page)
    assert "script" not in seen.tags
    assert "link" not in seen.tags
    assert "default-src 'none'" in page
    assert all(href.startswith("data:") for href in seen.links)
    assert seen.texts["title"] == ["<p>"]


def test_one_line_has_no_line_ends() -> None:
    assert one_line(" a\r\n\tb\x1b ") == "a b␛"
