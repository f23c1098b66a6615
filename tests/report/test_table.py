"""If this fails, a narrow terminal breaks a number or hides which run a row is of, or a pipe gets half of a table."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rung.report.table import Coloured, loss_text, paragraph, print_table, value_text

WORDS = st.lists(st.text("abcdefgh0123456789.-", min_size=1, max_size=12), min_size=1, max_size=9).map(" ".join)
NUMBERS = st.integers(0, 10**9).map(str)
QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(
    rows=st.lists(st.tuples(NUMBERS, WORDS, NUMBERS, NUMBERS, WORDS), min_size=1, max_size=5),
    width=st.integers(40, 140),
)
def test_no_word_is_broken_and_what_is_kept_is_there(
    rows: list[tuple[str, ...]], width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    capsys.readouterr()
    print_table(["run", "what", "loss", "step", "why"], rows, numeric=(0, 2, 3), keep=(0, 2))
    head, *lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines)
    words = {word for row in rows for cell in row for word in cell.split()}
    body, _, note = " ".join(lines).partition("…")
    assert set(body.split()) <= words
    assert all(row[0] in body.split() and row[2] in body.split() for row in rows)
    for name in ("what", "step", "why"):
        assert name in head.split() or name in note


def test_without_a_terminal_a_table_is_as_wide_as_it_needs_to_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(["run", "why"], [["a/1", "x " * 300]])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_columns_line_up_where_signs_are_wide(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table(["run", "loss"], [["日本", "1.5"], ["abcd", "2.5"]], numeric=(1,))
    assert capsys.readouterr().out.splitlines() == ["run   loss", "日本   1.5", "abcd   2.5"]


def test_colours_are_for_terminals_alone(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["run", "change"], [["a/1", Coloured("-0.1", "green")]])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.5, "0.5"), (0.00025, "0.00025"), (4.320457, "4.32"), (float("nan"), "NaN"),
     (12345.678, "1.235e+04"), (60, "60"), (["a", "b"], "a b"), ("x" * 99, "x" * 59 + "…")],
)  # fmt: skip
def test_values_are_rounded_for_people(value: object, text: str) -> None:
    assert value_text(value) == text


def test_losses_keep_their_fourth_decimal() -> None:
    assert [loss_text(one) for one in (4.32045737, float("inf"), None)] == ["4.3205", "inf", "-"]


def test_a_paragraph_breaks_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    path = "runs/piano/1/samples/00000060/sample-0.wav"
    assert path in paragraph(f"look at {path} and listen", "a  ").split()
