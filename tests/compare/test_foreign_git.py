"""If this fails, looking at a run that came from a stranger executes the stranger's commands through git."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rung.runs.maintenance.cleaning import clean
from rung.runs.maintenance.selection import folder_at
from rung.runs.maintenance.trash import remove
from rung.runs.record import Record, amend
from tests.compare.made import git, make_repo, make_run

SETTINGS = {
    "core.fsmonitor": "{}", "core.hooksPath": "{}.d", "core.sshCommand": "{}", "core.pager": "{}",
    "diff.external": "{}", "diff.evil.textconv": "{}", "diff.evil.command": "{}", "filter.evil.clean": "{}",
    "filter.evil.smudge": "{}", "filter.evil.process": "{}", "core.alternateRefsCommand": "{}", "core.editor": "{}",
    "gpg.program": "{}", "credential.helper": "{}", "core.gitProxy": "{}", "protocol.allow": "always",
    "protocol.ssh.allow": "always", "protocol.ext.allow": "always", "remote.origin.url": "ssh://nowhere/x",
    "remote.origin.promisor": "true", "remote.origin.partialclonefilter": "blob:none",
    "extensions.partialClone": "origin", "core.repositoryFormatVersion": "1", "commit.gpgSign": "true",
    "uploadpack.packObjectsHook": "{}", "sequence.editor": "{}", "interactive.diffFilter": "{}",
}  # fmt: skip


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """A program that leaves a mark where it was executed."""
    file = tmp_path / "evil"
    file.write_text(f"#!/bin/sh\necho $0 $@ >> {tmp_path}/executed\nexit 1\n")
    file.chmod(0o755)
    hooks = tmp_path / "evil.d"
    hooks.mkdir()
    for name in ("reference-transaction", "post-index-change", "pre-commit", "post-checkout", "fsmonitor-watchman"):
        shutil.copy(file, hooks / name)
    return file


def arm(folder: Path, command: Path) -> str:
    """Makes a folder a repository whose settings execute the command; its one commit, without the blobs."""
    git(folder, "init", "-q", "-b", "main")
    (folder / ".gitattributes").write_text("* filter=evil diff=evil\n")
    (folder / "model.py").write_text("WIDTH = 1\n")
    git(folder, "add", "-A", ":!/runs")
    git(folder, "commit", "-qm", "first")
    commit = git(folder, "rev-parse", "HEAD").strip()
    blob = git(folder, "rev-parse", "HEAD:model.py").strip()
    (folder / ".git/objects" / blob[:2] / blob[2:]).unlink()
    for key, value in SETTINGS.items():
        git(folder, "config", key, value.format(command))
    return commit


def rung(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([sys.executable, "-m", "rung", *words], cwd=folder, env=env, capture_output=True, text=True)


def test_the_settings_do_execute_where_git_is_asked_plainly(tmp_path: Path, command: Path) -> None:
    """Or the other tests would show nothing."""
    (tmp_path / "plain").mkdir()
    commit = arm(tmp_path / "plain", command)
    subprocess.run(["git", "-C", str(tmp_path / "plain"), "show", commit], capture_output=True, check=False)
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("at", ["the run", "files of the run", "a .git file", "the runs folder", "the lab"])
def test_diff_asks_git_in_no_folder_of_a_stranger(tmp_path: Path, command: Path, at: str) -> None:
    lab = tmp_path / "lab"
    lab.mkdir()
    a, b = (make_run(lab / "runs", salt=number) for number in (1, 2))
    place = {"the run": a.path, "files of the run": a.path / "files", "a .git file": tmp_path / "aside",
             "the runs folder": lab / "runs", "the lab": lab}[at]  # fmt: skip
    place.mkdir(exist_ok=True)
    commit = arm(place, command)
    if at == "a .git file":
        shutil.move(place / ".git", tmp_path / "git-dir")
        (a.path / ".git").write_text(f"gitdir: {tmp_path}/git-dir\n")
    (tmp_path / "executed").unlink(missing_ok=True)  # by preparing it
    for run, name in ((a, commit), (b, "0" * 39 + "1")):
        kept = {"kind": "git", "commit": name, "tree": name[::-1], "ref": "refs/rung/ab", "root": str(place)}
        amend(run.path, code=kept)
    for other in (commit, "0" * 39 + "1"):  # two commits of it, and one that it lacks
        amend(b.path, code={"kind": "git", "commit": other, "tree": "1", "ref": "refs/rung/cd", "root": str(place)})
        for words in (["diff", "piano/1", "piano/2", "--patch"], ["diff", "piano/1", "piano/2", "--json"]):
            done = rung(lab, *words)
            assert "Traceback" not in done.stderr, done.stderr
        rung(lab, "report", "piano/1")
        rung(lab, "show", "piano/1")
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()


def test_a_resume_and_gc_ask_git_where_the_user_is(
    tmp_path: Path, command: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, stranger = make_repo(tmp_path / "lab"), tmp_path / "stranger"
    stranger.mkdir()
    commit = arm(stranger, command)
    ref = stranger / ".git/refs/rung/ab"
    ref.parent.mkdir()
    ref.write_text(f"{commit}\n")
    (tmp_path / "executed").unlink(missing_ok=True)
    monkeypatch.chdir(lab)
    run = make_run(lab / "runs")
    amend(run.path, code={"kind": "git", "commit": commit, "ref": "refs/rung/ab", "root": str(stranger)})
    record = Record.reopen(run.path, command=["rung", "resume"])
    record.finish("finished")
    document = json.loads((run.path / "run.json").read_text())
    kept = document["segments"][-1]["code"]
    assert kept["root"] == str(lab)
    assert git(lab, "rev-parse", kept["ref"]).strip() == kept["commit"]
    remove([folder_at(run.path)])
    done = clean(lab / "runs", is_real=True)
    assert [ref.ref for ref in done.refs] == [kept["ref"]]
    assert ref.read_text() == f"{commit}\n"
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()


def test_nobody_asks_git_from_within_a_run(tmp_path: Path, command: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who goes into a run's folder and resumes it there."""
    run = make_run(tmp_path / "lab/runs")
    arm(run.path, command)
    (tmp_path / "executed").unlink(missing_ok=True)
    amend(run.path, code={"kind": "git", "commit": "0" * 40, "ref": "refs/rung/ab", "root": str(run.path)})
    monkeypatch.chdir(run.path)
    Record.reopen(run.path, command=["rung", "resume"]).finish("finished")
    assert json.loads((run.path / "run.json").read_text())["segments"][-1]["code"]["kind"] != "git"
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()
