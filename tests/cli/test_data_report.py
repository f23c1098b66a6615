"""If this fails, `rung data world --report` gives no page, or a mistake in asking for one ends in a traceback."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipes.world.stores import write_store

Rung = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path / "data" / "walk", (120, 40), height=24, width=32, shift=1)


def test_a_report_is_a_summary_and_a_page_beside_the_store(rung: Rung, store: Path) -> None:
    done = rung("data", "world", "--report", "--name", str(store))
    assert done.returncode == 0, done.stderr
    page = store.parent / "walk-report" / "report.md"
    assert page.is_file()
    assert str(page) in done.stdout

    done = rung("data", "world", "--report", "--name", str(store), "--json")
    figures = json.loads(done.stdout)
    assert figures["alignment"]["lag"] == -1
    assert figures["path"] == str(page.parent)


def test_a_report_needs_data_of_its_own_kind(rung: Rung, store: Path) -> None:
    before = sorted(store.parent.iterdir())
    for words, expected in (
        (("data", "world", "--report", "--name", "nowhere"), "`rung data world --name nowhere`"),
        (("data", "world", "--report"), "`rung data world`"),
        (("data", "world", "--report", "--replace", "--name", str(store)), "[options-conflict]"),
        (("data", "world", "--report", "--from", str(store), "--name", str(store)), "[options-conflict]"),
        (("data", "piano", "--report", "--name", str(store)), "[not-supported]"),
    ):
        done = rung(*words, check=False)
        assert done.returncode == 2, words
        assert expected in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert sorted(store.parent.iterdir()) == before
