"""If this fails, `rung rm`, `gc`, `mv`, `tag`, `pin` or `du` does not do what it says, or says what it did not do."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rung.cli import cli
from rung.errors import UserError
from rung.runs.query import list_runs
from rung.runs.record import Record, amend, read_document


def make(root: Path, experiment: str = "piano", status: str | None = "finished", **fields: Any) -> Record:
    given: dict[str, Any] = {
        "recipe": "piano", "preset": None, "command": ["rung"], "seed": 1, "config": {}, "sources": {}, "derived": {},
        "data": {},
    }  # fmt: skip
    record = Record.create(root, experiment, **{**given, **fields})
    record.log(0, {"loss": 1.0})
    if status is not None:
        record.finish(status)
    return record


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs that are over, the second from the first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUNG_RUNS", raising=False)
    for parent in (None, "piano/1", None):
        make(tmp_path / "runs", parent=parent)
    return tmp_path / "runs"


def ask(*words: str) -> str:
    result = CliRunner().invoke(cli, words)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def refusal(*words: str) -> str:
    """What is said instead of doing it; one line."""
    with pytest.raises(UserError) as error:
        ask(*words)
    assert "\n" not in str(error.value)
    return f"{error.value} [{error.value.code}]"


def ids(root: Path) -> list[str]:
    return [run.id for run in list_runs(root)]


def test_rm_prints_how_to_undo_it_and_that_works(root: Path) -> None:
    text = ask("rm", "piano/2..3")
    assert ids(root) == ["piano/1"]
    undo = text.splitlines()[-1].partition("rung ")[2].split()
    assert undo == ["rm", "--undo", "piano/2", "piano/3"]
    ask(*undo)
    assert ids(root) == ["piano/1", "piano/2", "piano/3"]


def test_the_undo_line_finds_the_folder_that_the_run_was_in(root: Path, tmp_path: Path) -> None:
    there = tmp_path / "other place/runs"
    make(there)
    for words in (["piano/1", "--runs", str(there)], [str(there / "piano/1")]):
        undo = shlex.split(ask("rm", *words).splitlines()[-1].partition("rung ")[2])
        assert ids(there) == []
        ask(*undo)
        assert ids(there) == ["piano/1"]
    assert "--runs" not in ask("rm", "piano/3", "--runs", str(root)), "it is the usual one"


def test_rm_of_a_parent_needs_force(root: Path) -> None:
    assert "[in-use]" in refusal("rm", "piano/1")
    assert "piano/2" in ask("rm", "piano/1", "--force")  # it says who needs it
    assert ids(root) == ["piano/2", "piano/3"]
    ask("rm", "--undo")
    ask("rm", "piano/1", "piano/2")
    assert ids(root) == ["piano/3"]


def test_rm_dry_run_and_list(root: Path) -> None:
    assert json.loads(ask("rm", "piano/3", "--dry-run", "--json")) == ["piano/3"]
    assert ids(root) == ["piano/1", "piano/2", "piano/3"]
    assert json.loads(ask("rm", "--list", "--json")) == []
    ask("rm", "piano/3")
    assert ask("rm", "--list").splitlines()[1].startswith("piano/3 ")
    assert [one["id"] for one in json.loads(ask("rm", "--list", "--json"))] == ["piano/3"]
    assert "piano/3" in ask("rm", "--undo", "-n")
    assert len(ids(root)) == 2


def test_rm_of_what_ended_badly(root: Path) -> None:
    make(root, status="crashed")
    good = make(root, status=None)
    good.event("eval", step=1, results={"val": {"loss": 1.0}})
    good.finish("diverged")
    make(root, status="diverged")
    make(root, status=None).close()
    amend(root / "piano/7", process={**read_document(root / "piano/7")["process"], "pid": 2**22 + 1})
    assert json.loads(ask("rm", "--failed", "piano", "--json")) == ["piano/4", "piano/6", "piano/7"]
    assert ids(root) == [f"piano/{n}" for n in (1, 2, 3, 5)]
    assert json.loads(ask("rm", "--failed", "piano", "--json")) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rm"], "[missing-run]"),
        (["rm", "piano"], "[missing-run]"),
        (["rm", "piano/9"], "piano/9"),
        (["rm", "piano/8..9"], "piano/8..9"),
        (["rm", "--undo"], ""),
        (["rm", "--undo", "piano/1"], ""),
        (["rm", "--undo", "--failed", "piano"], "[options-conflict]"),
        (["rm", "--list", "piano/1"], "[options-conflict]"),
        (["rm", "--failed", "bach"], "bach"),
        (["mv", "piano", "a/b/c"], ""),
        (["mv", "piano/1", "../x"], "'..'"),
        (["mv", "nothing/1", "x"], "nothing/1"),
        (["tag", "+x"], "[missing-run]"),
        (["tag", "piano/1", "two words"], "two words"),
        (["tag", "piano/1", "+\x1b[31mred"], "red"),
        (["tag", "piano/1", "+x", "-x"], "[options-conflict]"),
        (["tag", "piano/9", "x"], "piano/9"),
        (["pin", "piano/1", "best"], "piano/1"),
        (["pin", "piano/1", "30"], "30"),
        (["pin", "piano/1", "1", "--off", "1"], "[options-conflict]"),
        (["du", "bach"], "bach"),
        (["du", "piano/9"], "piano/9"),
        (["mv", "piano/1", f"bach/{10**40}"], "bach/1"),
        (["mv", "piano/1", "bach/" + "1" * 5000], "bach/1"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_mistakes_get_a_sentence_and_change_nothing(root: Path, words: list[str], expected: str) -> None:
    def seen() -> dict[str, bytes]:
        return {str(path): path.read_bytes() if path.is_file() else b"" for path in root.rglob("*")}

    before = seen()
    assert expected in refusal(*words)
    assert seen() == before


def test_what_is_running_or_unreadable(root: Path) -> None:
    going = make(root, "bach", status=None)
    (root / "piano/3/run.json").write_text('{"schema": 99, "status": "finished"}')
    assert "bach/1" in refusal("rm", "bach/1", "--force")
    assert "bach/1" in refusal("mv", "bach", "new")
    assert "[run-damaged]" in refusal("rm", "piano/3")
    assert "99" in refusal("mv", "piano", "new")
    assert "[run-damaged]" in refusal("tag", "piano/1..3", "x")
    assert read_document(root / "piano/1")["tags"] == [], "one was tagged although not all could be"
    assert "piano/3" in ask("du")
    ask("tag", "bach/1", "alive")
    ask("gc", "--yes")
    going.finish("finished")
    assert read_document(going.path)["tags"] == ["alive"]
    ask("rm", "piano/3", "--force")


def test_gc_shows_first_and_deletes_with_yes(root: Path) -> None:
    assert json.loads(ask("gc", "--json"))["items"] == []
    ask("rm", "piano/3")
    for words in (["gc"], ["gc", "--yes", "--dry-run"], ["gc", "--yes", "--days", "1"]):
        ask(*words)
        assert (root / ".trash/piano.3").is_dir(), words
    assert "--yes" in ask("gc")
    plan = json.loads(ask("gc", "--json"))
    assert plan["deleted"] is False
    done = json.loads(ask("gc", "--yes", "--json"))
    assert (done["deleted"], done["bytes"]) == (True, plan["bytes"])
    assert not (root / ".trash").exists()
    refusal("rm", "--undo")


def test_mv_says_what_is_now_called_what(root: Path) -> None:
    assert [line.split()[-1] for line in ask("mv", "piano", "bach").splitlines()] == ["bach/1", "bach/2", "bach/3"]
    assert {run["id"]: run["parent"] for run in json.loads(ask("ls", "--json"))} == {
        "bach/1": None, "bach/2": "bach/1", "bach/3": None,
    }  # fmt: skip
    assert json.loads(ask("mv", "bach/3", "old", "--json")) == {"bach/3": "old/1"}
    assert read_document(root / "old/1")["formerly"] == ["piano/3", "bach/3"]


def test_tags(root: Path) -> None:
    ask("tag", "piano/1..2", "+baseline", "-old", "+höhe/1")
    ask("tag", "piano/3", "baseline", "-hot")  # -h would be the help of another verb
    assert json.loads(ask("tag", "--json")) == {"baseline": 3, "höhe/1": 2}
    assert ask("tag").splitlines()[1].split() == ["baseline", "3"]
    assert "old" in ask("tag", "piano/1", "-old", "-baseline")  # which it did not have
    assert json.loads(ask("tag", "piano/1", "--json")) == {"piano/1": ["höhe/1"]}
    decomposed = unicodedata.normalize("NFD", "höhe/1")
    assert json.loads(ask("tag", "piano/2", f"-{decomposed}", "--json")) == {"piano/2": ["baseline"]}
    amend(root / "piano/1", tags=["\x1b[31mred\n"])
    assert "\x1b" not in ask("tag") + ask("tag", "piano/1")


def test_pins(root: Path) -> None:
    folder = root / "piano/1/checkpoints"
    for step in (10, 20):
        (folder / f"{step:08d}").mkdir(parents=True)
        (folder / f"{step:08d}/manifest.json").write_text("{}")
    (folder / "best").write_text("10\n")
    ask("pin", "piano/1", "best")
    ask("pin", "piano/1", "10")
    assert [line.split()[3:] for line in ask("pin", "piano/1").splitlines()[1:]] == [["pinned,", "best"], ["last"]]
    assert [save["is_pinned"] for save in json.loads(ask("pin", "piano/1", "last", "--json"))] == [True, True]
    ask("pin", "piano/1", "--off", "best")
    assert (folder / "pinned").read_text() == "20\n"
    assert "(20)" in refusal("rm", "piano/1", "piano/2")


def test_du_adds_up(root: Path) -> None:
    (root / "piano/2/samples").mkdir()
    (root / "piano/2/samples/a.wav").write_bytes(b"x" * 50_000)
    os.link(root / "piano/2/samples/a.wav", root / "piano/3/again.wav")
    ask("rm", "piano/1", "--force")
    found = json.loads(ask("du", "--json"))
    assert [one["id"] for one in found["runs"]] == ["piano/2", "piano/3"]
    assert found["runs"][0]["samples"] == 50_000
    for one in found["runs"]:
        assert one["total"] == sum(size for kind, size in one.items() if kind not in ("id", "total"))
    assert found["total"] == sum(one["total"] for one in found["runs"]) - 50_000
    assert found["trash"] > 0
    assert [one["id"] for one in json.loads(ask("du", "piano/3..", "piano/3", "--json"))["runs"]] == ["piano/3"]
    text = ask("du", "piano", "-n", "1")
    assert "piano/3" not in text
    assert "rung gc" in text  # how to empty the trash


def test_none_of_them_needs_torch_or_numpy(root: Path) -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
from click.testing import CliRunner
from rung.cli import cli
for words in ("rm piano/3", "rm --undo", "rm --list", "gc --yes", "mv piano bach", "tag bach/1 x", "tag", "pin bach/1",
              "du"):
    done = CliRunner().invoke(cli, words.split())
    assert done.exit_code == 0, (words, done.output, done.exception)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=root.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
