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
    return str(error.value)


def ids(root: Path) -> list[str]:
    return [run.id for run in list_runs(root)]


def test_rm_prints_how_to_undo_it_and_that_works(root: Path) -> None:
    text = ask("rm", "piano/2..3")
    assert ids(root) == ["piano/1"]
    undo = text.splitlines()[-1].removeprefix("to undo: rung ").split()
    assert undo == ["rm", "--undo", "piano/2", "piano/3"]
    ask(*undo)
    assert ids(root) == ["piano/1", "piano/2", "piano/3"]


def test_the_undo_line_finds_the_folder_that_the_run_was_in(root: Path, tmp_path: Path) -> None:
    there = tmp_path / "other place/runs"
    make(there)
    for words in (["piano/1", "--runs", str(there)], [str(there / "piano/1")]):
        undo = shlex.split(ask("rm", *words).splitlines()[-1].removeprefix("to undo: rung "))
        assert ids(there) == []
        ask(*undo)
        assert ids(there) == ["piano/1"]
    assert "--runs" not in ask("rm", "piano/3", "--runs", str(root)), "it is the usual one"


def test_rm_of_a_parent_needs_force(root: Path) -> None:
    assert refusal("rm", "piano/1") == "piano/2 comes from piano/1; to remove all the same, add --force."
    assert "piano/2 comes from piano/1" in ask("rm", "piano/1", "--force")
    assert ids(root) == ["piano/2", "piano/3"]
    ask("rm", "--undo")
    ask("rm", "piano/1", "piano/2")
    assert ids(root) == ["piano/3"]


def test_rm_dry_run_and_list(root: Path) -> None:
    assert "piano/3 would go to the trash" in ask("rm", "piano/3", "--dry-run")
    assert ids(root) == ["piano/1", "piano/2", "piano/3"]
    assert ask("rm", "--list") == "the trash is empty\n"
    ask("rm", "piano/3")
    assert ask("rm", "--list").splitlines()[1].startswith("piano/3 ")
    assert [one["id"] for one in json.loads(ask("rm", "--list", "--json"))] == ["piano/3"]
    assert "would come back" in ask("rm", "--undo", "-n")
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
    assert "no run of piano" in ask("rm", "--failed", "piano")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rm"], "which runs?"),
        (["rm", "piano"], "is an experiment"),
        (["rm", "piano/9"], "no piano/9"),
        (["rm", "piano/8..9"], "no run in piano/8..9"),
        (["rm", "--undo"], "is empty"),
        (["rm", "--undo", "piano/1"], "is empty"),
        (["rm", "--undo", "--failed", "piano"], "not --failed"),
        (["rm", "--list", "piano/1"], "takes neither"),
        (["rm", "--failed", "bach"], "no run bach"),
        (["mv", "piano", "a/b/c"], "none"),
        (["mv", "piano/1", "../x"], "cannot name an experiment"),
        (["mv", "nothing/1", "x"], "no run nothing/1"),
        (["tag", "+x"], "which runs?"),
        (["tag", "piano/1", "two words"], "cannot be a tag"),
        (["tag", "piano/1", "+\x1b[31mred"], "cannot be a tag"),
        (["tag", "piano/1", "+x", "-x"], "say one of the two"),
        (["tag", "piano/9", "x"], "no piano/9"),
        (["pin", "piano/1", "best"], "marked as its best"),
        (["pin", "piano/1", "30"], "no whole save at 30"),
        (["pin", "piano/1", "1", "--off", "1"], "say one of the two"),
        (["du", "bach"], "no run bach"),
        (["du", "piano/9"], "no piano/9"),
        (["mv", "piano/1", f"bach/{10**40}"], "neither an experiment nor a run"),
        (["mv", "piano/1", "bach/" + "1" * 5000], "neither an experiment nor a run"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_mistakes_get_a_sentence_and_change_nothing(root: Path, words: list[str], said: str) -> None:
    def seen() -> dict[str, bytes]:
        return {str(path): path.read_bytes() if path.is_file() else b"" for path in root.rglob("*")}

    before = seen()
    assert said in refusal(*words)
    assert seen() == before


def test_what_is_running_or_unreadable(root: Path) -> None:
    going = make(root, "bach", status=None)
    (root / "piano/3/run.json").write_text('{"schema": 99, "status": "finished"}')
    assert "bach/1 is running" in refusal("rm", "bach/1", "--force")
    assert "bach/1 is running" in refusal("mv", "bach", "new")
    assert "newer rung" in refusal("rm", "piano/3")
    assert "newer rung" in refusal("mv", "piano", "new")
    assert "newer rung" in refusal("tag", "piano/1..3", "x")
    assert read_document(root / "piano/1")["tags"] == [], "one was tagged although not all could be"
    assert "piano/3" in ask("du")
    ask("tag", "bach/1", "alive")
    ask("gc", "--yes")
    going.finish("finished")
    assert read_document(going.path)["tags"] == ["alive"]
    ask("rm", "piano/3", "--force")


def test_gc_shows_first_and_deletes_with_yes(root: Path) -> None:
    assert ask("gc") == "nothing to clear\n"
    ask("rm", "piano/3")
    for words in (["gc"], ["gc", "--yes", "--dry-run"], ["gc", "--yes", "--days", "1"]):
        ask(*words)
        assert (root / ".trash/piano.3").is_dir(), words
    assert "add --yes" in ask("gc")
    plan = json.loads(ask("gc", "--json"))
    assert plan["deleted"] is False
    done = json.loads(ask("gc", "--yes", "--json"))
    assert (done["deleted"], done["bytes"]) == (True, plan["bytes"])
    assert not (root / ".trash").exists()
    assert "is empty" in refusal("rm", "--undo")


def test_mv_says_what_is_now_called_what(root: Path) -> None:
    text = ask("mv", "piano", "bach")
    assert text.splitlines()[:3] == [f"piano/{n} is now bach/{n}" for n in (1, 2, 3)]
    assert "bach/2" in text.splitlines()[3]
    assert json.loads(ask("mv", "bach/3", "old", "--json")) == {"bach/3": "old/1"}
    assert read_document(root / "old/1")["formerly"] == ["piano/3", "bach/3"]


def test_tags(root: Path) -> None:
    ask("tag", "piano/1..2", "+baseline", "-old", "+höhe/1")
    ask("tag", "piano/3", "baseline", "-hot")  # -h would be the help of another verb
    assert json.loads(ask("tag", "--json")) == {"baseline": 3, "höhe/1": 2}
    assert ask("tag").splitlines()[1].split() == ["baseline", "3"]
    assert "had no old" in ask("tag", "piano/1", "-old", "-baseline")
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
    assert "at 10 is now pinned" in ask("pin", "piano/1", "best")
    assert "was already" in ask("pin", "piano/1", "10")
    assert [line.split()[3:] for line in ask("pin", "piano/1").splitlines()[1:]] == [["pinned,", "best"], ["last"]]
    assert [save["is_pinned"] for save in json.loads(ask("pin", "piano/1", "last", "--json"))] == [True, True]
    assert "is now not pinned" in ask("pin", "piano/1", "--off", "best")
    assert (folder / "pinned").read_text() == "20\n"
    assert "pinned checkpoints (20)" in refusal("rm", "piano/1", "piano/2")


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
    assert "hard links" in text
    assert "in the trash" in text


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
