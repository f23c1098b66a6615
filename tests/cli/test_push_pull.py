"""If this fails, `rung push`, `rung pull` or `rung ls --remote` does not do what its help says, or answers a mistake
with more than a sentence."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from rung.cli import cli
from rung.errors import UserError
from rung.runs.query import list_runs, open_run
from tests.remote.conftest import s3, server  # noqa: F401 - fixtures
from tests.remote.items import contents, finished
from tests.remote.servers import free_port, started

EVIL = "up\x1b[2J[bold]& <b>*down*\nnew line"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RUNG_RUNS", "RUNG_DATA", "RUNG_REMOTE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def ask(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli, [*map(str, words)])
    if isinstance(done.exception, UserError):
        assert "\n" not in str(done.exception)
        return 2, f"{done.exception} [{done.exception.code}]"
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


def good(*words: object) -> str:
    code, output = ask(*words)
    assert code == 0, output
    return output


def test_runs_go_there_and_come_back(folder: Path) -> None:
    for _ in range(3):
        finished(Path("runs"))
    finished(Path("runs"), experiment="speech")
    assert "piano/1  " in good("push", "piano/1..2", "./there")
    assert good("push", "piano", "speech/last", "./there").count("\n") >= 4
    assert json.loads(good("push", "runs/piano/1", "./there", "--json"))[0]["num_sent"] == 0
    shown = good("ls", "--remote", "./there")
    assert [line.split()[0] for line in shown.splitlines()[1:]] == ["piano/1", "piano/2", "piano/3", "speech/1"]
    assert "2.5000" in shown
    good("pull", "piano", "./there", "--runs", "back")
    good("pull", "speech/1..", "./there", "--runs", "back")
    assert [run.id for run in list_runs(Path("back"))] == ["piano/1", "piano/2", "piano/3", "speech/1"]
    pulled = json.loads(good("pull", folder / "there/runs/piano/2", "--runs", "back", "--json"))
    assert [one["what"] for one in pulled] == ["unchanged"]
    assert "0 sent" not in good("push", "piano/3", "./there", "--verify")


def test_a_folder_can_be_left_out_as_the_shell_completes_it(folder: Path) -> None:
    run = finished(Path("runs"))
    assert (run.path / "samples").is_dir()
    good("push", "piano/1", "./there", "--without", "samples/")
    assert not [path for path in contents(Path("there")) if "samples" in path]


def test_the_same_in_a_bucket(folder: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    finished(Path("runs"))
    monkeypatch.setenv("RUNG_REMOTE", s3)
    done = json.loads(good("push", "piano/1", "--json"))
    assert done[0]["url"] == f"{s3}/runs/piano/1"
    assert done[0]["num_sent"] == done[0]["num_files"]
    there = json.loads(good("ls", "--remote", "--json"))
    assert (there["url"], there["runs"][0]["id"], there["data"]) == (s3, "piano/1", [])
    assert there["runs"][0]["best"]["loss"] == 2.5
    back = json.loads(good("pull", f"{s3}/runs/piano/1", "--runs", "back", "--json"))
    assert (back[0]["name"], back[0]["what"]) == ("piano/1", "new")
    assert contents(Path("back/piano/1")).keys() == {
        path for path in contents(Path("runs/piano/1")) if path != "heartbeat" and "columns" not in path
    }


def test_a_data_set_goes_there_and_comes_back(folder: Path, piano_data: Path) -> None:
    shutil.copytree(piano_data, "data/tunes")
    assert "tunes  " in good("push", "--data", "tunes", "./there")
    assert json.loads(good("push", "--data", "data/tunes", "./there", "--json"))[0]["num_sent"] == 0
    shown = good("ls", "--remote", "./there")
    assert "tunes" in shown
    assert "run " not in shown
    shutil.rmtree("data")
    good("pull", "--data", "tunes", "./there")
    assert contents(Path("data/tunes")) == contents(piano_data)
    good("data", "verify", "tunes")
    good("pull", "--data", "tunes", "./there", "--as", "copy")
    good("pull", folder / "there/data/tunes", "--as", "another")
    assert contents(Path("data/copy")) == contents(Path("data/another")) == contents(piano_data)
    (Path("data/tunes") / "index.jsonl").write_bytes(b"changed")
    code, said = ask("push", "--data", "tunes", "./there")
    assert (code, "data/tunes" in said) == (2, True)


def test_the_next_free_number(folder: Path) -> None:
    finished(Path("theirs"))
    finished(Path("runs"))
    good("push", "piano/1", "./there", "--runs", "theirs")
    code, said = ask("pull", "piano/1", "./there")
    assert (code, "--as piano" in said) == (2, True)
    assert good("pull", "piano/1", "./there", "--as", "piano").startswith("piano/2 ")
    assert open_run("piano/2", Path("runs")).document["formerly"] == ["piano/1"]


def test_deleting_asks_or_is_told(folder: Path) -> None:
    for _ in range(2):
        finished(Path("runs"))
    good("push", "piano", "./there")
    code, said = ask("push", "--delete", "piano/1", "./there")
    assert (code, "[not-confirmed]" in said) == (2, True)
    assert len(json.loads(good("ls", "--remote", "./there", "--json"))["runs"]) == 2
    good("push", "--delete", "piano/1", "./there", "--yes")
    assert json.loads(good("push", "--delete", "piano", "./there", "--yes", "--json"))[0]["name"] == "piano/2"
    assert json.loads(good("ls", "--remote", "./there", "--json"))["runs"] == []
    assert not [path for path in Path("there").rglob("*") if path.is_file()]
    assert len(list_runs(Path("runs"))) == 2


def test_what_users_wrote_stays_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rung.runs.record import amend

    monkeypatch.setenv("COLUMNS", "200")

    run = finished(Path("runs"))
    amend(run.path, why=EVIL)
    good("push", "piano/1", "./there")
    shown = good("ls", "--remote", "./there")
    assert "\x1b" not in shown
    assert len(shown.splitlines()) == 2
    good("pull", "piano/1", "./there", "--runs", "back")
    assert open_run("piano/1", Path("back")).document["why"] == EVIL


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["push", "piano/1"], "[missing-url]"),
        (["push", "./there"], "[missing-run]"),
        (["push", "piano/9", "./there"], "piano/9"),
        (["push", "guitar", "./there"], "guitar"),
        (["push", "piano/1", "ftp://x/y"], "ftp://"),
        (["push", "--data", "nothing", "./there"], "nothing"),
        (["pull", "./there"], "[missing-run]"),
        (["pull", "piano/1", "./nowhere"], "nowhere"),
        (["pull", "piano/7", "./there"], "piano/7"),
        (["pull", "guitar", "./there"], "guitar"),
        (["pull", "--data", "x", "./there"], " x"),
        (["pull", "piano/1", "--data", "x", "--as", "y", "./there"], "[options-conflict]"),
        (["pull", "piano/1", "--as", "../x", "./there"], "../x"),
        (["push", "--delete", "piano/9", "./there", "--yes"], "piano/9"),
        (["push", "piano/1", "--without", "sampels", "./there"], "[no-folder]"),
        (["push", "piano/1", "--without", "checkpoints/", "./there"], "[options-conflict]"),
        (["ls", "--remote"], "[missing-url]"),
        (["ls", "../x", "--remote", "./there"], "../x"),
        (["ls", "--remote", "there"], "./there"),
        (["ls", "--remote", "./there", "--sort", "best"], "[options-conflict]"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(folder: Path, words: list[str], says: str) -> None:
    finished(Path("runs"))
    good("push", "piano/1", "./there")
    before = contents(folder)
    code, said = ask(*words)
    assert code == 2
    assert says in said
    assert contents(folder) == before


def test_a_wrong_bucket_or_endpoint_is_exit_two(
    folder: Path,
    s3: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    rung: Callable[..., object],
) -> None:
    finished(Path("runs"))
    done = rung("push", "piano/1", "s3://no-such-bucket/x", check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr  # type: ignore[attr-defined]
    assert "no-such-bucket" in done.stderr  # type: ignore[attr-defined]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    done = rung("pull", "piano/1", s3, check=False)
    assert (done.returncode, "127.0.0.1" in done.stderr) == (2, True)  # type: ignore[attr-defined]


def test_another_server(folder: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """rclone passes over conditions, and keeps real files: all the rest holds."""
    binary = shutil.which("rclone", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if binary is None:
        pytest.skip("needs rclone")
    port, keys = free_port(), ("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    Path("kept/bucket").mkdir(parents=True)
    command = [binary, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", ",".join(keys), str(folder / "kept")]
    with started(command, f"http://127.0.0.1:{port}/"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys[0])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys[1])
        finished(Path("runs"))
        good("push", "piano/1", "s3://bucket/lab", "--verify")
        good("pull", "piano/1", "s3://bucket/lab", "--runs", "back")
        assert open_run("piano/1", Path("back")).status == "finished"
        good("push", "--delete", "piano/1", "s3://bucket/lab", "--yes")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x" * 40)
        code, said = ask("ls", "--remote", "s3://bucket/lab")
        assert (code, "AWS_SECRET_ACCESS_KEY" in said) == (2, True)
