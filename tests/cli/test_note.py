"""If this fails, a note or a verdict is lost, changed or mixed up, or a run that is going on loses what it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rung.cli import cli
from rung.compare.page import notes_of
from rung.errors import UserError
from rung.runs.annotate import MOST_CHARS
from rung.runs.query import open_run
from rung.runs.record import Record, amend
from tests.compare.made import make_run, start_run
from tests.errors import raises_code


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUNG_RUNS", str(tmp_path / "runs"))
    make_run(tmp_path / "runs")
    return tmp_path / "runs"


def rung(*words: str, given: str | bytes | None = None) -> Result:
    result = CliRunner().invoke(cli, list(words), input=given)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def texts(root: Path, name: str = "piano/1") -> list[str]:
    return [note["text"] for note in notes_of(open_run(name, root))]


def test_notes_are_kept_in_order_and_listed(root: Path) -> None:
    rung("note", "piano/1", "the first")
    rung("note", "piano", "- the second\nhas two lines")
    assert texts(root) == ["the first", "- the second\nhas two lines"]
    listed = rung("note", "piano/1").output.splitlines()
    assert [line[25:] for line in listed[:2]] == ["the first", "- the second"]
    assert listed[2] == "  has two lines"
    assert [note["text"] for note in json.loads(rung("note", "piano/1", "--json").output)] == texts(root)


def test_a_note_from_standard_input(root: Path) -> None:
    rung("note", "piano/1", "-", given="read\n\nfrom a pipe: ü\n")
    rung("note", "piano/1", "-", given=b"not \xff utf-8")
    assert texts(root) == ["read\n\nfrom a pipe: ü", "not \ufffd utf-8"]


@given(st.text(min_size=1).filter(lambda text: text.strip() and text != "-" and not text.startswith("-")))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_any_text_comes_back(root: Path, text: str) -> None:
    before = texts(root)
    rung("note", "piano/1", "--", text)
    kept = text.encode("utf-8", "replace").decode().rstrip("\n")
    assert texts(root) == [*before, kept]


def test_undo_takes_the_last_one_back_and_deletes_nothing(root: Path) -> None:
    for text in ("one", "two", "three"):
        rung("note", "piano/1", text)
    size = (root / "piano" / "1" / "events.ndjson").stat().st_size
    assert "three" in rung("note", "piano/1", "--undo").output
    assert "two" in rung("note", "piano/1", "--undo").output
    assert texts(root) == ["one"]
    rung("note", "piano/1", "four")
    assert texts(root) == ["one", "four"]
    assert (root / "piano" / "1" / "events.ndjson").stat().st_size > size
    assert len(list(open_run("piano/1", root).events("note"))) == 4


def test_what_a_terminal_would_obey_is_shown(root: Path) -> None:
    rung("note", "piano/1", "red \x1b[31m\x07")
    assert "\x1b" not in rung("note", "piano/1").output
    assert texts(root) == ["red \x1b[31m\x07"]


def test_a_verdict_and_its_history(root: Path) -> None:
    assert json.loads(rung("verdict", "piano/1", "--json").output) == {"verdict": None, "history": []}
    rung("verdict", "piano/1", "refuted", "no effect")
    assert "refuted: no effect" in rung("verdict", "piano/1", "supported").output  # what it replaces
    verdict = open_run("piano/1", root).document["verdict"]
    assert (verdict["word"], verdict["text"]) == ("supported", "")
    rung("verdict", "piano/1", "--clear")
    assert open_run("piano/1", root).document["verdict"] is None
    found = json.loads(rung("verdict", "piano/1", "--json").output)
    assert [one["word"] for one in found["history"]] == ["refuted", "supported", None]
    assert found["verdict"] is None


def test_an_older_verdict_is_shown_when_it_is_replaced(root: Path) -> None:
    amend(root / "piano" / "1", verdict="looks good")
    assert "looks good" in rung("verdict", "piano/1", "inconclusive").output


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["note", "piano/1", " \n "], "text-empty"),
        (["note", "piano/1", "x", "--undo"], "options-conflict"),
        (["note", "piano/1", "--undo"], "no-note"),
        (["note", "piano/1", "x" * (MOST_CHARS + 1)], "too-large"),
        (["verdict", "piano/1", "--clear"], "no-verdict"),
        (["verdict", "piano/1", "refuted", "--clear"], "options-conflict"),
        (["verdict", "piano/1", "refuted", ""], "text-empty"),
    ],
)
def test_mistakes_get_a_sentence_and_change_nothing(root: Path, words: list[str], code: str) -> None:
    before = [(root / "piano" / "1" / name).read_bytes() for name in ("run.json", "events.ndjson")]
    with raises_code(code):
        rung(*words)
    assert [(root / "piano" / "1" / name).read_bytes() for name in ("run.json", "events.ndjson")] == before


def test_a_word_that_is_no_verdict(root: Path) -> None:
    assert rung("verdict", "piano/1", "maybe").exit_code == 2


def test_after_a_torn_line(root: Path) -> None:
    with (root / "piano" / "1" / "events.ndjson").open("ab") as file:
        file.write(b'{"kind": "note", "te')
    rung("note", "piano/1", "after it")
    assert texts(root) == ["after it"]


def test_many_writers_and_a_run_that_goes_on(root: Path) -> None:
    """Four processes note and judge while the run logs and updates itself: every line is whole, nothing is lost."""
    record: Record = start_run(root, "live")
    code = """
import sys
from click.testing import CliRunner
from rung.cli import cli
name = sys.argv[1]
for i in range(15):
    for words in (["note", "live/1", f"{name}.{i} " + "x" * 3000], ["verdict", "live/1", "refuted", name]):
        assert CliRunner().invoke(cli, words).exit_code == 0
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, str(n)]) for n in range(4)]
    step = 0
    while any(writer.poll() is None for writer in writers):
        record.log(step, {"loss": 1.0})
        record.event("save", step=step)
        record.update(best={"step": step, "set": "val", "loss": 1.0})
        step += 1
    assert all(writer.wait() == 0 for writer in writers)
    record.finish("finished")
    run = open_run("live/1", root)
    assert sorted(text.split()[0] for text in texts(root, "live/1")) == sorted(
        f"{n}.{i}" for n in range(4) for i in range(15)
    )
    assert len(list(run.events("verdict"))) == 60
    assert len(list(run.events("save"))) == step
    assert run.document["verdict"]["word"] == "refuted"
    assert run.document["best"]["step"] == step - 1
    assert run.status == "finished"


def test_an_option_with_a_space_in_its_value_is_no_text(root: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "my runs")
    rung("note", "piano/1", "heard it", f"--runs={tmp_path / 'my runs'}")
    assert texts(tmp_path / "my runs") == ["heard it"]
    assert texts(root) == []


def test_a_name_in_a_record_from_elsewhere_steers_no_terminal(root: Path) -> None:
    amend(root / "piano/1", id="pia\x1b[31mno")
    for words in (["note", "piano/1"], ["note", "piano/1", "x"], ["note", "piano/1", "--undo"], ["verdict", "piano/1"],
                  ["verdict", "piano/1", "supported"], ["diff", "piano/1", "piano/1"]):  # fmt: skip
        try:
            assert "\x1b" not in rung(*words).output
        except UserError as error:  # refused is as good
            assert "\x1b" not in str(error)  # noqa: PT017
