"""If this fails, the code of a run is not the code that ran, or keeping it disturbed the user's checkout."""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rung.runs import provenance
from rung.runs.query import open_run
from rung.runs.record import Record

Start = Callable[..., Record]
IDENTITY = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]


def git(folder: Path, *args: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    command = ["git", "-C", str(folder), *IDENTITY, *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A commit, a staged change, an unstaged one, untracked and ignored files, and a runs folder."""
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    files = {".gitignore": "*.bin\n", "a.py": "a = 1\n", "b.py": "b = 1\n", "sub/c.py": "c = 1\n", "gone.py": "x\n"}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    monkeypatch.chdir(folder)
    (folder / "a.py").write_text("a = 2\n")
    git(folder, "add", "a.py")
    (folder / "a.py").write_text("a = 3\n")
    (folder / "b.py").write_text("b = 2\n")
    (folder / "gone.py").unlink()
    (folder / "new file ü.py").write_text("new\n")
    (folder / "weights.bin").write_text("ignored\n")
    (folder / "runs").mkdir()
    (folder / "runs/log.txt").write_text("not code\n")
    return folder


def state(repo: Path) -> tuple[str, str, str, bytes]:
    index = repo / git(repo, "rev-parse", "--git-path", "index").strip()
    head = (repo / git(repo, "rev-parse", "--git-path", "HEAD").strip()).read_text()
    return git(repo, "status", "--porcelain"), head, git(repo, "branch", "-a"), index.read_bytes()


def files(repo: Path, ref: str) -> dict[str, str]:
    names = git(repo, "ls-tree", "-r", "-z", "--name-only", ref).split("\0")[:-1]
    return {name: git(repo, "show", f"{ref}:{name}") for name in names}


def keep(repo: Path, name: str = "piano/1", **given: Any) -> dict[str, Any]:
    return provenance.snapshot(given.pop("code_root", repo), repo, name, [repo / "runs"])


def test_the_whole_working_tree_is_kept_and_nothing_disturbed(repo: Path) -> None:
    before = state(repo)
    code = keep(repo)
    assert state(repo) == before
    assert code["kind"] == "git"
    assert code["ref"] == "refs/rung/piano/1"
    assert files(repo, code["ref"]) == {
        ".gitignore": "*.bin\n", "a.py": "a = 3\n", "b.py": "b = 2\n", "sub/c.py": "c = 1\n", "new file ü.py": "new\n",
    }  # fmt: skip
    assert code["dirty"]
    assert sorted(code["changed"]) == ["A new file ü.py", "D gone.py", "M a.py", "M b.py"]
    assert code["head"] == git(repo, "rev-parse", "HEAD").strip()
    assert git(repo, "rev-parse", f"{code['commit']}^").strip() == code["head"]
    assert git(repo, "rev-parse", code["ref"]).strip() == code["commit"]


def test_from_a_subfolder_a_worktree_and_a_detached_head(repo: Path, tmp_path: Path) -> None:
    assert "a.py" in files(repo, keep(repo, "x/1", code_root=repo / "sub")["ref"])
    git(repo, "checkout", "-q", "--detach")
    before = state(repo)
    assert files(repo, keep(repo, "x/2")["ref"])["a.py"] == "a = 3\n"
    tree = tmp_path / "tree"
    git(repo, "worktree", "add", "-q", "-b", "other", str(tree))
    (tree / "b.py").write_text("b = 9\n")
    other = state(tree)
    code = provenance.snapshot(tree, tree, "x/3", [])
    assert state(tree) == other
    assert files(repo, code["ref"])["b.py"] == "b = 9\n"
    assert state(repo)[0] == before[0]


def test_a_repository_without_commits(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("a\n")
    code = provenance.snapshot(tmp_path, tmp_path, "x/1", [])
    assert code["head"] is None
    assert code["changed"] == ["A a.py"]
    assert files(tmp_path, code["ref"]) == {"a.py": "a\n"}
    assert git(tmp_path, "status", "--porcelain") == "?? a.py\n"


def test_a_clean_tree_is_its_own_commit(repo: Path) -> None:
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "second")  # with the runs folder tracked, as some people do
    (repo / "runs/log.txt").write_text("changed by the run\n")
    code = keep(repo)
    assert (code["dirty"], code["changed"]) == (False, [])
    assert "runs/log.txt" not in files(repo, code["ref"])
    git(repo, "rm", "-r", "-q", "-f", "runs")
    git(repo, "commit", "-q", "-m", "third")
    assert keep(repo, "piano/2")["commit"] == git(repo, "rev-parse", "HEAD").strip()


def test_edits_hidden_from_git_are_kept(repo: Path) -> None:
    git(repo, "update-index", "--assume-unchanged", "sub/c.py")
    (repo / "sub/c.py").write_text("c = 2\n")
    before = state(repo)
    assert files(repo, keep(repo)["ref"])["sub/c.py"] == "c = 2\n"
    assert state(repo) == before


def test_a_hidden_edit_that_git_cannot_tell_by_its_time_is_kept(repo: Path) -> None:
    """As when the index is written again in a later second than the edit: git trusts the times it has noted."""
    git(repo, "config", "core.trustctime", "false")
    os.utime(repo / "sub/c.py", (10**9, 10**9))
    git(repo, "add", "-A")
    git(repo, "update-index", "--assume-unchanged", "sub/c.py")
    (repo / "sub/c.py").write_text("c = 2\n")
    os.utime(repo / "sub/c.py", (10**9, 10**9))
    assert files(repo, keep(repo)["ref"])["sub/c.py"] == "c = 2\n"


def test_an_edit_in_the_same_second_and_of_the_same_size_is_kept(repo: Path) -> None:
    """Git tells such an edit by the age of the index, so the copy of the index must be as old as the index."""
    git(repo, "config", "core.trustctime", "false")
    os.utime(repo / "sub/c.py", (10**9, 10**9))
    git(repo, "add", "-A")
    (repo / "sub/c.py").write_text("c = 8\n")
    for path in (repo / "sub/c.py", repo / ".git/index"):
        os.utime(path, (10**9, 10**9))
    assert files(repo, keep(repo)["ref"])["sub/c.py"] == "c = 8\n"


def test_large_secret_and_nested_things_are_left_out_and_listed(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "UNTRACKED_BYTES", 1000)
    (repo / "big.npy").write_bytes(b"x" * 1001)
    (repo / ".env").write_text("TOKEN=1\n")
    (repo / "nested").mkdir()
    git(repo / "nested", "init", "-q")
    (repo / "nested/a.py").write_text("a")
    git(repo / "nested", "add", "-A")
    git(repo / "nested", "commit", "-q", "-m", "x")
    code = keep(repo)
    assert not {"big.npy", ".env", "nested", "nested/a.py"} & files(repo, code["ref"]).keys()
    assert sorted(line.split()[0] for line in code["left_out"]) == [".env", "big.npy", "nested/"]


def test_edits_in_a_submodule_are_kept(repo: Path, tmp_path: Path) -> None:
    """Without them its commit is kept; with them its files, those of a submodule in it too."""
    for name in ("inner", "lib"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q")
        (tmp_path / name / f"{name}.py").write_text(f"{name} = 1\n")
        git(tmp_path / name, "add", "-A")
        git(tmp_path / name, "commit", "-q", "-m", name)
        if name == "lib":
            git(tmp_path / name, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(tmp_path / "inner"))
            git(tmp_path / name, "commit", "-q", "-m", "inner")
    allowed = ("-c", "protocol.file.allow=always")
    git(repo, *allowed, "submodule", "add", "-q", str(tmp_path / "lib"))
    git(repo, *allowed, "submodule", "update", "-q", "--init", "--recursive")
    assert git(repo, "ls-tree", keep(repo)["ref"], "lib").startswith("160000 commit")
    (repo / "lib/inner/inner.py").write_text("inner = 2\n")
    (repo / "lib/new.py").write_text("new\n")
    (repo / "lib/.env").write_text("TOKEN=1\n")
    before = state(repo), state(repo / "lib")
    code = keep(repo, "piano/2")
    assert (state(repo), state(repo / "lib")) == before
    found = files(repo, code["ref"])
    assert found["lib/inner/inner.py"] == "inner = 2\n"
    assert (found["lib/lib.py"], found["lib/new.py"]) == ("lib = 1\n", "new\n")
    assert "lib/.env (looks like a secret)" in code["left_out"]
    assert "lib/.env" not in found


SECRETS = [
    ".env", "prod.env", ".aws/credentials", ".git-credentials", ".pypirc", ".npmrc", "id_ecdsa", "key.p12", "a/b.pem",
    "credentials.json", "client_secret_x.json", ".docker/config.json", "secrets.yaml",
]  # fmt: skip


@pytest.mark.parametrize("is_git", [True, False])
def test_no_secret_is_kept(repo: Path, tmp_path: Path, is_git: bool) -> None:
    folder = repo if is_git else tmp_path / "plain"
    for name in (*SECRETS, "secrets.py", "keys.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("a")
    code = provenance.snapshot(folder, tmp_path, "x/1", [])
    if is_git:
        found = set(files(repo, code["ref"]))
    else:
        with tarfile.open(tmp_path / "code.tar.gz") as tar:
            found = set(tar.getnames())
    assert not found & set(SECRETS)
    assert {"secrets.py", "keys.py"} <= found
    seen = [name for name in SECRETS if is_git or (not name.startswith(".") and name.endswith((".json", ".yaml")))]
    assert {f"{name} (looks like a secret)" for name in seen} <= set(code["left_out"])


def test_a_ref_is_never_moved(repo: Path) -> None:
    first = keep(repo)
    (repo / "a.py").write_text("a = 4\n")
    second = keep(repo)
    assert first["ref"] != second["ref"]
    assert files(repo, first["ref"])["a.py"] == "a = 3\n"
    assert files(repo, second["ref"])["a.py"] == "a = 4\n"


def test_a_git_that_points_elsewhere_is_ignored(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "no-index"))
    assert keep(repo)["kind"] == "git"


def test_outside_git_the_sources_go_into_an_archive(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    others = ["weights.pt", ".hidden/x.py", "runs/piano/1/x.py", "__pycache__/y.py", ".env"]
    for name in ["train.py", "conf/a.yaml", *others]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "huge.json").write_text("x" * 1_000_001)
    (tmp_path / "out").mkdir()
    code = provenance.snapshot(folder, tmp_path / "out", "x/1", [folder / "runs"])
    assert code["kind"] == "tar"
    assert code["left_out"] == ["huge.json (too large)"]
    with tarfile.open(tmp_path / "out/code.tar.gz") as tar:
        assert tar.getnames() == ["train.py", "conf/a.yaml"]
    os.utime(folder / "train.py", (1, 1))
    assert provenance.snapshot(folder, tmp_path / "out", "x/2", [folder / "runs"])["sha256"] == code["sha256"]


def test_a_folder_that_git_ignores_is_archived(repo: Path, tmp_path: Path) -> None:
    (repo / "scratch.bin").mkdir()
    (repo / "scratch.bin/t.py").write_text("t")
    assert provenance.snapshot(repo / "scratch.bin", tmp_path, "x/1", [])["kind"] == "tar"


def test_a_failed_snapshot_is_a_warning_and_the_run_goes_on(
    repo: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repo / ".git/HEAD").write_text("rubbish\n")
    record = start(code_root=repo)
    assert open_run("piano", tmp_path / "runs").document["code"]["kind"] == "tar"

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(provenance, "pack", fail)
    record = start(code_root=repo)
    run = open_run(record.id, tmp_path / "runs")
    assert run.document["code"]["kind"] == "none"
    assert "No space left" in run.document["code"]["warning"]
    assert [event["kind"] for event in run.events()] == ["warning"]


def test_a_run_and_its_resume_keep_their_own_code(repo: Path, start: Start) -> None:
    record = start(root=repo / "runs", code_root=repo)
    record.finish("stopped")
    (repo / "a.py").write_text("a = 5\n")
    again = Record.reopen(record.path, command=[])
    document = open_run(again.path, repo / "runs").document
    refs = [document["code"]["ref"], document["segments"][1]["code"]["ref"]]
    uid = document["uid"]
    assert refs == [f"refs/rung/{uid}", f"refs/rung/{uid}.1"], "the name of the run may change, its uid does not"
    assert git(repo, "log", "-1", "--format=%s", refs[1]).strip() == "rung: the code of piano/1"
    assert [files(repo, ref)["a.py"] for ref in refs] == ["a = 3\n", "a = 5\n"]
    assert not [name for name in files(repo, refs[1]) if name.startswith("runs/")]


def test_outside_git_a_resume_leaves_the_first_archive_alone(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text("lr = 1\n")
    record = start(code_root=script.parent)
    record.finish("stopped")
    script.write_text("lr = 2\n")
    monkeypatch.chdir(script.parent)
    again = Record.reopen(record.path, command=["rung", "resume"])
    again.finish("finished")
    run = open_run("piano", tmp_path / "runs")
    kept = [run.document["code"]["file"], run.document["segments"][1]["code"]["file"]]
    texts = []
    for name in kept:
        with tarfile.open(run.path / name) as tar:
            member = tar.extractfile("train.py")
            assert member is not None
            texts.append(member.read())
    assert texts == [b"lr = 1\n", b"lr = 2\n"]


def test_a_file_name_that_is_not_utf8(repo: Path, start: Start) -> None:
    (repo / os.fsdecode(b"caf\xe9.py")).write_text("x = 1\n")
    record = start(root=repo / "runs", code_root=repo)
    record.finish("finished")
    assert any("caf" in line for line in open_run("piano", repo / "runs").document["code"]["changed"])
