"""If this fails, a page that somebody was sent shows a broken picture, runs a script, or asks the network."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from rung.compare.page import run_page
from rung.report.html import to_html
from rung.runs.query import open_run
from rung.runs.record import append_event
from tests.compare.made import make_run, start_run

EVIL = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>[a](javascript:window.hit=1)'


def png() -> bytes:
    """One red pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\x00\xff\x00\x00")) + chunk(b"IEND", b"")


def wav() -> bytes:
    """A tenth of a second of silence."""
    data = bytes(1600)
    form = struct.pack("<IHHIIHH", 16, 1, 1, 8000, 16000, 2, 16)
    return (
        b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + form + b"data" + struct.pack("<I", len(data)) + data
    )


@pytest.fixture
def page_file(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    make_run(root)
    record = start_run(root, parent="piano/1", why=EVIL)
    for step in range(40):
        record.log(step, {"loss": 5.0 - step / 20, "lr": 1e-3, "targets": 10.0, "step_s": 0.1})
    record.event("eval", step=40, results={"val": {"loss": 2.5}})
    record.add_sample(40, "a.png", png(), EVIL)
    record.add_sample(40, "a.wav", wav(), "silence")
    record.add_sample(40, "a.mid", b"MThd", "a tune")
    record.add_sample(40, "a.txt", EVIL.encode(), "a text")
    record.finish("finished", last_step=40)
    append_event(record.path, "note", text=EVIL)
    file = tmp_path / "report.html"
    file.write_text(to_html(run_page(open_run(record.path, root), has_files=True).page), "utf-8")
    return file


def opened(browser: Any, file: Path, scheme: str) -> tuple[Any, list[str]]:
    """The page in a browser of this taste, and what it asked for."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1000, "height": 800})
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    return page, [url for url in asked if not url.startswith(("data:", file.as_uri()))]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_in_the_file(browser: Any, page_file: Path, scheme: str) -> None:
    page, asked = opened(browser, page_file, scheme)
    assert asked == []
    assert page.evaluate("window.hit") is None
    assert page.locator("figure svg").count() == 3
    assert page.evaluate("[...document.images].map(i => i.naturalWidth)") == [1]
    assert page.locator("audio[controls]").count() == 1
    assert page.locator("script").count() == 0
    assert EVIL in page.locator("blockquote").first.inner_text()
    assert any(EVIL in text for text in page.locator("pre").all_inner_texts())
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(browser: Any, page_file: Path, scheme: str) -> None:
    """The contrast of WCAG AA, for the page and for what is written in a plot."""
    page, _ = opened(browser, page_file, scheme)
    pairs = page.evaluate("""() => {
      const of = (element, name) => getComputedStyle(element)[name];
      const plot = document.querySelector(".plot"), ground = of(plot.querySelector(".ground"), "fill");
      return [[of(document.body, "color"), of(document.body, "backgroundColor")],
        ...[...plot.querySelectorAll("text")].map(text => [of(text, "fill"), ground])];
    }""")
    assert len(pairs) > 5
    for text, ground in pairs:
        assert contrast(text, ground) >= 4.5, (text, ground)
    page.context.close()


def contrast(one: str, other: str) -> float:
    a, b = sorted((light(one), light(other)), reverse=True)
    return (a + 0.05) / (b + 0.05)


def light(colour: str) -> float:
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_it_fits_a_telephone(browser: Any, page_file: Path) -> None:
    """Tables and code scroll by themselves; the page does not."""
    page, _ = opened(browser, page_file, "light")
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.context.close()
