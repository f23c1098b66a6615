"""If this fails, `rung diff` does not show a user the line that made the difference, or shows it as something else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rung.cli import cli
from rung.errors import UserError
from tests.compare.made import CONFIG, DEFINITIONS, SOURCES, changed, git, make_repo, make_run, start_run

Say = Callable[..., str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def say(root: Path) -> Say:
    """What `rung diff ...` prints; fails where it would not exit with 0."""

    def say(*words: str) -> str:
        done: Result = CliRunner().invoke(cli, ["diff", *words, "--runs", str(root)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.output

    return say


def test_the_very_line_of_an_uncommitted_edit_and_of_an_untracked_file(
    tmp_path: Path, root: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = make_repo(tmp_path / "repo")
    monkeypatch.chdir(repo)  # commits are read from the repository of the current folder
    (repo / "loss.py").write_text("WEIGHT = 1.0\n")
    make_run(root, code_root=repo)
    (repo / "model.py").write_text("WIDTH = 64\nDEPTH = 2\n")
    make_run(root, code_root=repo)
    (repo / "loss.py").write_text("WEIGHT = 0.1\n")
    make_run(root, code_root=repo)
    edited, untracked = say("piano/1", "piano/2"), say("piano/2", "piano/3")
    assert "-WIDTH = 32\n+WIDTH = 64\n" in edited
    assert [one["name"] for one in json.loads(say("piano/1", "piano/2", "--json"))["confounders"]] == ["model.py"]
    assert "-WEIGHT = 1.0\n+WEIGHT = 0.1\n" in untracked
    assert git(repo, "status", "--porcelain") == " M model.py\n?? loss.py\n"
    declared = json.loads(say("piano/2", "piano/3", "--declare", "code", "--json"))
    assert (declared["is_strict"], declared["factor"]["name"]) == (True, "loss.py")


def test_one_key(tmp_path: Path, root: Path, say: Say) -> None:
    repo = make_repo(tmp_path / "repo")
    make_run(root, code_root=repo)
    sources = {**SOURCES, "optimizer.grad_clip": "command line"}
    make_run(root, code_root=repo, config=changed(CONFIG, optimizer__grad_clip=0.5), sources=sources, parent="piano/1",
             why="norm sits\nat 1.0", losses=(4.0, 2.9, 2.5, 2.3))  # fmt: skip
    out = say("piano/1", "piano/2").splitlines()
    assert out[1].endswith("norm sits at 1.0")  # on one line
    assert any(line.split() == ["40", "2.4000", "2.3000", "-0.1"] for line in out)
    found = json.loads(say("piano/1", "piano/2", "--json"))
    assert found["is_strict"] is True
    assert found["factor"]["name"] == "optimizer.grad_clip"
    assert found["outcome"]["b"]["final"] == {"step": 40.0, "value": 2.3}
    assert found["outcome"]["at_targets"][0]["at"] == 16000.0


def test_a_long_patch_shows_its_head_and_how_to_see_the_rest(
    tmp_path: Path, root: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = make_repo(tmp_path / "repo", {"long.py": "".join(f"x{i} = 1\n" for i in range(100))})
    monkeypatch.chdir(repo)
    make_run(root, code_root=repo)
    (repo / "long.py").write_text("".join(f"x{i} = 2\n" for i in range(100)))
    make_run(root, code_root=repo)
    short, whole, stat = (
        say("piano/1", "piano/2"),
        say("piano/1", "piano/2", "--patch"),
        say("piano/1", "piano/2", "--stat"),
    )
    assert "160 of 200" in short
    assert "+x99 = 2" not in short
    assert "+x99 = 2" in whole
    assert "-x0 = 1" not in stat
    assert "long.py" in stat


def test_text_of_users_stays_text(tmp_path: Path, root: Path, say: Say) -> None:
    repo = make_repo(tmp_path / "repo")
    make_run(root, code_root=repo, why="\x1b[2J\x1b]0;owned\x07 **bold** <b>", config=changed(CONFIG, note="a"))
    (repo / "model.py").write_text("WIDTH = '\x1b[31m\u202e'\r\n")
    make_run(root, code_root=repo, config=changed(CONFIG, note="\x1b[8m\nhidden \u202e"))
    out = say("piano/1", "piano/2")
    assert "**bold** <b>" in out
    assert not set("\x1b\x07\u202e\r") & set(out)


def test_two_folders_with_a_run_of_one_name(root: Path, say: Say, tmp_path: Path) -> None:
    make_run(root)
    make_run(tmp_path / "other", config=changed(CONFIG, optimizer__grad_clip=0.5))
    out = say("piano/1", str(tmp_path / "other/piano/1"))
    assert f"{root}/piano/1 " in out
    assert f"{tmp_path}/other/piano/1 " in out


def test_every_sentence_says_which_of_two_namesakes_it_means(root: Path, say: Say, tmp_path: Path) -> None:
    make_run(root)
    other = make_run(tmp_path / "other", status=None, losses=(float("nan"),), weights=None).path
    found = json.loads(say("piano/1", str(other), "--json"))
    texts = [*found["notes"], *found["outcome"]["problems"], *(one["detail"] for one in found["differences"])]
    about = [text for text in texts if "piano/1" in text]
    assert len(about) >= 3
    assert all(str(other) in text or str(root) in text for text in about)
    assert found["b"]["id"] == "piano/1"


def test_another_cut_is_told_with_a_word_on_dropout(root: Path, say: Say) -> None:
    for batch_size, num_micros in ((16, 1), (8, 2)):
        cut = {"data__batch_size": batch_size, "optimizer__gradient_accumulation_steps": num_micros}
        make_run(root, config=changed(CONFIG, **cut))
    assert "dropout" in say("piano/1", "piano/2")


def test_what_cannot_be_compared_is_said(root: Path, say: Say) -> None:
    make_run(root, losses=(float("nan"), 3.0))
    make_run(root, every=7, losses=(3.0,), definitions={"eval/val": {**DEFINITIONS["eval/val"], "mask": "other"}})
    start_run(root).close()
    problems = json.loads(say("piano/1", "piano/2", "--json"))["outcome"]["problems"]
    assert len(problems) == 3  # a value that is not finite, no step in common, no targets in common
    assert "mask none -> other" in say("piano/1", "piano/2")
    assert "piano/3" in say("piano/1", "piano/3")
    assert json.loads(say("piano/3", "piano/3", "--json"))["is_strict"] is False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["piano/1", "piano/9"], "piano/9"),
        (["piano/1", "piano/2", "--metric", "val/los"], "val/loss"),
    ],
)
def test_mistakes_are_one_sentence(root: Path, say: Say, words: list[str], said: str) -> None:
    make_run(root)
    make_run(root)
    with pytest.raises(UserError, match=said):
        say(*words)


def test_a_newer_run_and_a_damaged_one_are_refused(root: Path, say: Say) -> None:
    make_run(root)
    newer = make_run(root)
    document = json.loads((newer.path / "run.json").read_text())
    (newer.path / "run.json").write_text(json.dumps({**document, "schema": 99}))
    with pytest.raises(UserError, match="99"):
        say("piano/1", "piano/2")
    (newer.path / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json"):
        say("piano/1", "piano/2")


def test_a_torn_last_line_and_a_run_that_goes_on(root: Path, say: Say) -> None:
    make_run(root)
    record = start_run(root)
    record.log(0, {"loss": 5.0, "targets": 1.0})
    with (record.path / "metrics/000.ndjson").open("a") as rows, (record.path / "events.ndjson").open("a") as events:
        rows.write('{"step": 1, "lo')
        events.write('{"kind": "ev')
    found = json.loads(say("piano/1", "piano/2", "--json"))
    assert (found["b"]["status"], found["b"]["step"]) == ("running", 0)
    assert any("piano/2" in text and "val/loss" in text for text in found["outcome"]["problems"])
    record.close()


def test_a_folder_from_another_machine(tmp_path: Path, root: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = make_repo(tmp_path / "repo")
    make_run(root, code_root=repo)
    (repo / "model.py").write_text("WIDTH = 64\n")
    make_run(root, code_root=repo)
    shutil.rmtree(repo)
    monkeypatch.chdir(tmp_path)
    found = json.loads(say("piano/1", "piano/2", "--json"))
    assert found["code"]["problem"]
    assert not found["is_strict"]


def test_diff_works_without_torch_and_numpy(root: Path) -> None:
    make_run(root)
    make_run(root)
    code = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; from rung.cli import main; main()"

    command = [sys.executable, "-c", code, "diff", "piano/1", "piano/2", "--runs", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert "piano/2" in done.stdout
