"""A browser and a served world for the tests of the pages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

STATIC = Path(__file__).resolve().parents[2] / "rung" / "web" / "static"
# As root in a container there is no sandbox to be had; the rest keeps the browser from calling home.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if not (STATIC / "world.html").exists():
        pytest.skip("the page is not built; `make page` builds it")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as control:
        launched = control.chromium.launch(executable_path=chromium, args=FLAGS)
        launched.rung_path = chromium  # for tests that launch another one, with flags of their own
        yield launched
        launched.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page as a new visitor; fails the test if a script of the page fails."""
    contexts, problems = [], []

    def call(url: str, bypass_csp: bool = True) -> Any:
        # wait_for_function evaluates text, which the page's own policy forbids; one test leaves the policy on
        context = browser.new_context(bypass_csp=bypass_csp, viewport={"width": 1200, "height": 760})
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(url)
        return page

    yield call
    for context in contexts:
        context.close()
    assert problems == []
