"""If this fails, a run that came from somebody else makes rung read, write, delete or send what lies outside of it."""

from __future__ import annotations

import ast
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rung.cli import cli
from rung.errors import UserError
from rung.runs import paths
from rung.runs.columns import current, summaries
from rung.runs.query import open_run
from rung.runs.record import Record, append_event
from tests.errors import raises_code
from tests.remote.items import finished

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return finished(tmp_path / "lab/runs").path


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """What lies outside of the run; `unchanged` looks whether it still does."""
    folder = tmp_path / "private"
    (folder / "aside-1/00000005").mkdir(parents=True)
    (folder / "deep").mkdir()
    for name in ("a.txt", "index.json", "000.ndjson", "deep/b.txt", ".x.12.tmp", "aside-1/00000005/manifest.json"):
        (folder / name).write_text("password\n")
    for place in (folder, *folder.rglob("*")):
        os.utime(place, (1e9, 1e9))
    return folder


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes() if p.is_file() else b"", p.stat().st_mtime_ns) for p in folder.rglob("*")}


def rung(folder: Path, *words: str) -> tuple[int, str]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        done = CliRunner().invoke(cli, list(words), standalone_mode=False)
    finally:
        os.chdir(before)
    if isinstance(done.exception, UserError):
        return 2, f"{done.output}{done.exception} [{done.exception.code}]"
    if done.exception is not None:
        raise done.exception
    return 0, done.output


# Links


def test_show_deletes_nothing_where_its_copies_are_a_link(run: Path, private: Path, tmp_path: Path) -> None:
    before = state(private)
    shutil.rmtree(run / "metrics/columns", ignore_errors=True)
    (run / "metrics/columns").symlink_to(private)
    assert summaries(run / "metrics")["loss"].count == 20
    assert open_run(run, run.parents[1]).summary()["loss"].count == 20
    assert state(private) == before


def test_copies_with_a_link_among_them_are_made_again(
    run: Path, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the index names files elsewhere."""
    monkeypatch.setattr("rung.runs.columns._SMALL_BYTES", 0)
    before, out = state(private), run / "metrics/columns"
    made = current(run / "metrics")
    file = out / f"{made.mark}.step"
    data = file.read_bytes()
    (private / "column").write_bytes(data * 2)
    file.unlink()
    file.symlink_to(private / "column")
    record = Record.reopen(run, command=["rung"])
    record.log(20, {"loss": 1.0})
    record.finish("stopped")
    assert summaries(run / "metrics")["loss"].count == 21
    assert (private / "column").read_bytes() == data * 2
    index = json.loads((out / "index.json").read_text())
    for name in os.listdir(out):
        shutil.copy(out / name, private / name.replace(index["mark"], "elsewhere"))
    (out / "index.json").write_text(json.dumps({**index, "mark": os.path.relpath(private / "elsewhere", out)}))
    kept = state(private)
    Record.reopen(run, command=["rung"]).log(21, {"loss": 1.0})
    assert summaries(run / "metrics")["loss"].count == 22
    assert state(private) == kept
    assert set(before) <= set(kept)


TOP = ["run.json", "config.yaml", "events.ndjson", "metrics", "tables", "checkpoints", "samples", "captures", "evals",
       "heartbeat", "env.json", "report.md", "files", "mirror", ".config.json"]  # fmt: skip
READS = [["show", "piano/1"], ["note", "piano/1", "a note"], ["metrics", "piano/1"], ["doctor", "piano/1"],
         ["report", "piano/1"], ["diff", "piano/1", "piano/1"],
         ["pin", "piano/1", "20"], ["gc", "--derived", "--checkpoints", "--yes"],
         ["push", "piano/1", "../there"]]  # fmt: skip


@pytest.mark.parametrize("name", TOP)
def test_a_run_that_is_a_link_outwards_at_its_top_is_refused(run: Path, private: Path, name: str) -> None:
    place = run / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    target = private / "deep" if "." not in name and name != "heartbeat" else private / "a.txt"
    place.symlink_to(target)
    before = state(private)
    for words in READS:
        code, said = rung(run.parents[2], *words)
        assert code == 2 or words[0] == "gc", (words, said)
        assert place.name in said or (words[0], name) == ("gc", "run.json"), (words, said)
        assert "password" not in said
    with raises_code("leads-out"):
        Record.reopen(run, command=["rung"])
    with raises_code("leads-out"):
        open_run("piano/1", run.parents[1])
    assert state(private) == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("metrics/000.ndjson", ["metrics", "piano/1"]),
        ("metrics/000.ndjson", ["show", "piano/1"]),
        ("tables/000.ndjson", ["doctor", "piano/1"]),
        ("checkpoints/best", ["pin", "piano/1"]),
        ("checkpoints/00000010", ["pin", "piano/1", "10"]),
        ("checkpoints/aside-1", ["gc", "--checkpoints", "--yes"]),
        ("samples/00000020/a.txt", ["report", "piano/1", "--html"]),
        ("samples/00000030", ["report", "piano/1", "--html"]),
        ("evals/test-20.json", ["report", "piano/1", "--html"]),
    ],
)
def test_a_link_deeper_in_a_run_is_not_followed(run: Path, private: Path, name: str, words: list[str]) -> None:
    place = run / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    outside = "deep" if name.startswith("samples") else "aside-1"
    place.symlink_to(private / "a.txt" if "." in place.name or place.name == "best" else private / outside)
    before = state(private)
    code, said = rung(run.parents[2], *words)
    if words[0] not in ("report", "gc"):  # these pass it over
        assert (code, "leads-out" in said) == (2, True), said
    written = [file for file in run.parents[2].rglob("*") if file.is_file() and not file.is_symlink()]
    assert not [file for file in written if b"password" in file.read_bytes()]
    assert state(private) == before


def test_a_resume_writes_nowhere_else(run: Path, private: Path) -> None:
    record = Record.reopen(run, command=["rung"])
    before = state(private)
    for name in ("tables/001.ndjson", "samples/00000040"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).symlink_to(private / "deep" if "samples" in name else private / "a.txt")
    with raises_code("leads-out"):
        record.table("tensors", 1, ["a"], {"grad": [1.0]})
    with raises_code("leads-out"):
        record.add_sample(40, "b.txt", b"overwritten")
    assert state(private) == before


def test_a_file_that_is_being_written_is_always_a_new_one(run: Path, private: Path) -> None:
    """Its name can be guessed, and lie there as a link."""
    before = state(private)
    (run / f".run.json.{os.getpid()}.part").symlink_to(private / "a.txt")
    append_event(run, "note", text="x")
    Record.reopen(run, command=["rung"]).finish("finished")
    assert state(private) == before


def test_gc_clears_only_the_trash_of_the_runs_folder(run: Path, private: Path) -> None:
    root, before = run.parents[1], state(private)
    (root / ".trash").symlink_to(private)
    for words in (["gc", "--yes"], ["rm", "piano/1", "--force"]):
        code, said = rung(root.parent, *words)
        assert (code, "leads-out" in said) == (2, True), said
    (root / ".trash").unlink()
    (root / "theirs").symlink_to(private)
    (private / "7").mkdir()
    kept = state(private)
    rung(root.parent, "gc", "--yes", "--checkpoints", "--derived")
    assert state(private) == kept
    assert set(before) <= set(kept)


def test_what_is_no_file_is_not_waited_for(run: Path) -> None:
    (run / "metrics/001.ndjson").unlink(missing_ok=True)
    os.mkfifo(run / "metrics/001.ndjson")
    with raises_code("leads-out"):
        open_run("piano/1", run.parents[1]).metrics()
    os.unlink(run / "metrics/001.ndjson")
    os.unlink(run / "config.yaml")
    os.mkfifo(run / "config.yaml")
    with raises_code("leads-out"):
        open_run("piano/1", run.parents[1])


def test_links_within_the_run_work(run: Path) -> None:
    (run / "aside").mkdir()
    shutil.move(run / "checkpoints", run / "files")
    (run / "checkpoints").symlink_to("files")
    assert open_run("piano/1", run.parents[1]).checkpoints()


def test_a_runs_folder_may_itself_be_reached_by_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(run.parents[1])
    assert open_run("piano/1", tmp_path / "runs").summary()["loss"].count == 20
    assert rung(tmp_path, "show", "piano/1")[0] == 0


# Names


NAMES = ["../a.txt", "/etc/passwd", "a/../../b", "", ".", "..", "a//b", "a\0b", "./a"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_out_is_no_path(tmp_path: Path, name: str) -> None:
    with raises_code("bad-path"):
        paths.inside(tmp_path, name)


def test_names_in_a_run_json_lead_nowhere(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"python": "password", "sets": {"password": {"loss": 1.0}}}))
    out = os.path.relpath(secret, run)
    document = json.loads((run / "run.json").read_text())
    for name in (out, str(secret)):
        document["segments"][-1]["env"] = name
        (run / "run.json").write_text(json.dumps(document))
        with raises_code("bad-path"):
            open_run("piano/1", run.parents[1]).environment()
        append_event(run, "examined", file=name, split="test", weights="x")
        document["segments"][-1]["env"] = "env.json"
        (run / "run.json").write_text(json.dumps(document))
        assert "password" not in rung(run.parents[2], "show", "piano/1")[1]


def test_a_run_elsewhere_gets_no_name_that_leads_out(run: Path, tmp_path: Path) -> None:
    """`rung sample` writes to samples/<id>."""
    shutil.move(run, tmp_path / "loose")
    document = json.loads((tmp_path / "loose/run.json").read_text())
    for name in ("../../../.config/autostart", "/etc/cron.d", "a/../../b/1", "..", "a/1/../../x"):
        (tmp_path / "loose/run.json").write_text(json.dumps({**document, "id": name}))
        assert open_run(tmp_path / "loose", tmp_path / "runs").id == "loose/1"


def test_walk_stays_and_remove_removes_the_link(tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    for place in (folder / "a", outside):
        place.mkdir(parents=True)
        (place / "x").write_text("1")
    (folder / "b").symlink_to("a")
    assert sorted(paths.walk(folder)) == ["a/x"]
    (folder / "c").symlink_to(outside)
    with raises_code("leads-out"):
        list(paths.walk(folder))
    with raises_code("leads-out"):
        paths.remove(folder, "c/x")
    paths.remove(folder, "c")
    paths.remove(folder, "b")
    paths.remove(folder, "a")
    assert not list(folder.iterdir())
    assert (outside / "x").exists()


# What else would have to come by here


def joined(tree: ast.AST) -> list[tuple[int, str]]:
    """Where a path of a run is joined with a name that is no text of the program: `run.path / name`."""
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.left, ast.Attribute)):
            continue
        is_own = isinstance(node.right, ast.Constant) or (isinstance(node.right, ast.Name) and node.right.id.isupper())
        if node.left.attr == "path" and not is_own:
            found.append((node.lineno, ast.unparse(node)))
    return found


OWN_NAMES = {  # of this program, though no literals
    "rung/runs/record.py", "rung/runs/executed.py", "rung/runs/maintenance/cleaning.py", "rung/script/run.py",
    "rung/trackers/import_run.py",
}  # fmt: skip


def test_no_module_joins_the_path_of_a_run_with_a_name_from_elsewhere() -> None:
    found = []
    for file in sorted((ROOT / "rung").rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        if name not in OWN_NAMES and not name.startswith(("rung/recipes/", "rung/data/")):
            found += [f"{name}:{line} {text}" for line, text in joined(ast.parse(file.read_text("utf-8")))]
    assert not found


def calls(tree: ast.AST) -> list[tuple[str, dict[str, str]]]:
    return [(ast.unparse(n.func), {k.arg or "": ast.unparse(k.value) for k in n.keywords})
            for n in ast.walk(tree) if isinstance(n, ast.Call)]  # fmt: skip


def test_nothing_foreign_is_unpickled_unpacked_or_walked_through_links() -> None:
    wrong: list[Any] = []
    for file in sorted((ROOT / "rung").rglob("*.py")):
        for name, given in calls(ast.parse(file.read_text("utf-8"))):
            if name == "torch.load" and given.get("weights_only") != "True":
                wrong.append((file, name))
            if name in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
                wrong.append((file, name))
            if name.endswith((".extractall", ".unpack_archive")) or name in ("yaml.load", "yaml.unsafe_load"):
                wrong += [(file, name)] if "Safe" not in file.read_text("utf-8") else []
            if given.get("followlinks") == "True" and file.parent.name != "data":  # a folder that the user names
                wrong.append((file, name))
            if given.get("trust_remote_code") not in (None, "False"):
                wrong.append((file, name))
    assert not wrong
