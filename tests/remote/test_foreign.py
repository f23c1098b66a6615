"""If this fails, what is in a bucket hurts who pulls it: a file lands that no run has, or a run here is replaced by one
that only claims its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rung.remote.bucket import Bucket
from rung.remote.pull import PullOptions, pull_data, pull_run
from rung.remote.push import PushOptions, push, push_run
from rung.remote.snapshot import Snapshot, snapshot_run
from rung.runs.query import list_runs, open_run
from rung.runs.record import Record, amend, append_event
from tests.errors import raises_code
from tests.remote.items import contents, finished, save, start, steps, tree

NO_FILES_OF_A_RUN = [
    ".git/config", ".gitattributes", "checkpoints/.git/config", "files/.git/config", "files/.hidden", ".env",
    "evil.py", "__init__.py", "metrics/evil.py", "metrics/columns/index.json", "checkpoints/00000010/evil.py",
    "checkpoints/00000010/optimizer.pkl", "captures/00000010/evil.so", "sitecustomize.py", "evil.pth", "Makefile",
    "files/con", "files/a\\b", "files/a\nb", "samples/00000020/.bashrc", "tables/evil.sh", "conftest.py",
    ".config.json",
]  # fmt: skip
FILES_OF_A_RUN = [
    "config.yaml", "config.sources.json", "env.1.json", "executed.json", "executed.tar.gz", "code.tar.gz",
    "code.1.tar.gz", "metrics/001.ndjson", "tables/000.ndjson", "captures/00000012/batch.0.safetensors",
    "captures/00000012/capture.0.json", "captures/00000012/step.pt", "checkpoints/aside-1/00000005/model.safetensors",
    "checkpoints/aside-pulled/00000005/manifest.json", "samples/00000020/tune é.mid", "evals/test-20.json",
    "evals/test-20.windows.jsonl", "report.md", "report.html", "loss.svg", "epochs.json", "files/deep/train.py",
    "mirror/tensorboard/events.out.tfevents.1",
]  # fmt: skip


def forged(folder: Path, files: dict[str, bytes], uid: str = "u") -> Snapshot:
    """What a stranger pushes by another program: any files, with a run.json."""
    document = {"schema": 1, "id": "piano/1", "uid": uid, "status": "finished", "segments": []}
    item = tree(folder, {"run.json": json.dumps(document).encode(), **files})
    return replace(item, kind="run", name="piano/1", uid=uid)


@pytest.mark.parametrize("name", NO_FILES_OF_A_RUN)
def test_only_files_that_a_run_has_are_pulled(tmp_path: Path, name: str) -> None:
    bucket = Bucket(str(tmp_path / "there"), is_new=True)
    push(bucket, forged(tmp_path / "odd", {name: b"[core]"}))
    with raises_code("foreign-file") as caught:
        pull_run(bucket, "piano/1", tmp_path / "back")
    assert repr(name) in str(caught.value)
    assert not list((tmp_path / "back").rglob("*"))


def test_all_files_that_a_run_has_are_pulled(place: str, tmp_path: Path) -> None:
    bucket = Bucket(place, is_new=True)
    push(bucket, forged(tmp_path / "odd", dict.fromkeys(FILES_OF_A_RUN, b"1\n")))
    done = pull_run(bucket, "piano/1", tmp_path / "back")
    assert set(contents(done.path)) == {"run.json", *FILES_OF_A_RUN}


def test_data_brings_no_hidden_files(tmp_path: Path) -> None:
    bucket = Bucket(str(tmp_path / "there"), is_new=True)
    push(bucket, tree(tmp_path / "odd", {"manifest.json": b"{}", ".git/config": b"[core]"}))
    with raises_code("foreign-file"):
        pull_data(bucket, "tunes", tmp_path / "data/tunes")
    assert not (tmp_path / "data/tunes").exists()


def test_a_push_leaves_out_and_tells_what_no_run_has(place: str, tmp_path: Path) -> None:
    run, bucket = finished(tmp_path / "runs"), Bucket(place, is_new=True)
    (run.path / "notes.ipynb").write_text("{}")
    (run.path / "files").mkdir()
    (run.path / "files/notes.ipynb").write_text("{}")
    done = push_run(bucket, run.path, "all")
    assert done.left_out == ("notes.ipynb",)
    assert (pull_run(bucket, "piano/1", tmp_path / "back").path / "files/notes.ipynb").exists()


@pytest.mark.parametrize("where", ["checkpoints", "checkpoints/00000010", "samples/00000020", "files", "files/deep"])
@pytest.mark.parametrize("kind", ["a folder", "a file"])
def test_a_push_sends_nothing_from_outside_of_the_run(tmp_path: Path, where: str, kind: str) -> None:
    run, outside = finished(tmp_path / "runs"), tmp_path / "private"
    outside.mkdir()
    (outside / "id_rsa.json").write_text("secret")
    place = run.path / where
    place.mkdir(parents=True, exist_ok=True)
    (place / "innocent.json").symlink_to(outside if kind == "a folder" else outside / "id_rsa.json")
    bucket = Bucket(str(tmp_path / "there"), is_new=True)
    if where == "checkpoints/00000010":  # only what its manifest lists belongs to a checkpoint
        manifest = json.loads((place / "manifest.json").read_text())
        manifest["files"]["innocent.json"] = manifest["files"]["state.json"]
        (place / "manifest.json").write_text(json.dumps(manifest))
    with raises_code("leads-out") as caught:
        push_run(bucket, run.path, "all")
    assert str(place / "innocent.json") in str(caught.value)
    assert b"secret" not in b"".join(contents(tmp_path / "there").values())


def test_a_checkpoint_sends_no_file_that_it_names_elsewhere(tmp_path: Path) -> None:
    run = finished(tmp_path / "runs")
    (tmp_path / "secret").write_text("secret")
    file = run.path / "checkpoints/00000010/manifest.json"
    for name in ("../../../../../secret", str(tmp_path / "secret")):
        file.write_text(json.dumps({"step": 10, "files": {name: {"bytes": 6, "sha256": "0" * 64}}}))
        with raises_code("bad-path"), snapshot_run(run, "all"):
            pass


def test_links_within_a_run_are_sent_as_what_they_name(tmp_path: Path) -> None:
    """wandb's own folder has some."""
    run, bucket = finished(tmp_path / "runs"), Bucket(str(tmp_path / "there"), is_new=True)
    (run.path / "mirror/wandb/offline-1").mkdir(parents=True)
    (run.path / "mirror/wandb/offline-1/run.wandb").write_bytes(b":W&B")
    (run.path / "mirror/wandb/latest-run").symlink_to("offline-1")
    (run.path / "mirror/wandb/latest.wandb").symlink_to("offline-1/run.wandb")
    push_run(bucket, run.path)
    back = contents(pull_run(bucket, "piano/1", tmp_path / "back").path)
    assert back["mirror/wandb/latest.wandb"] == back["mirror/wandb/offline-1/run.wandb"] == b":W&B"
    assert "mirror/wandb/latest-run/run.wandb" not in back


def test_a_folder_that_somebody_laid_for_the_next_pull_leads_nowhere(tmp_path: Path) -> None:
    """A pull goes on with what a killed one left; that may have come with a copied runs folder."""
    bucket, outside = Bucket(str(tmp_path / "there"), is_new=True), tmp_path / "outside"
    outside.mkdir()
    run = finished(tmp_path / "ours")
    push_run(bucket, run.path, "all")
    from rung.remote import pull as pulls

    with pulls._staging_beside(tmp_path / "back/piano/1", run.document["uid"]) as staging:
        folder = staging.files.parent
    (folder / "files").mkdir(parents=True)
    (folder / "files/metrics").symlink_to(outside)
    (folder / "incoming").symlink_to(outside)
    pull_run(bucket, "piano/1", tmp_path / "back")
    assert not list(outside.iterdir())
    assert not (tmp_path / "back/piano/1/metrics").is_symlink()


# A run that has the uid of another


def lined(root: Path) -> Path:
    """A run here, with weights, a verdict and a best eval."""
    record = start(root)
    steps(record, 0, 20)
    record.event("eval", step=10, results={"val": {"loss": 2.5}})
    save(record.path, 10, is_best=True)
    save(record.path, 20)
    record.finish("finished", best={"step": 10, "set": "val", "loss": 2.5})
    append_event(record.path, "verdict", text="it holds")
    amend(record.path, verdict="it holds")
    return record.path


def other_weights(path: Path) -> None:
    for step in (10, 20):
        for file in (path / f"checkpoints/{step:08d}").iterdir():
            file.unlink()
        (path / f"checkpoints/{step:08d}").rmdir()
        save(path, step, is_best=step == 10)


def other_verdict(path: Path) -> None:
    amend(path, verdict="it does not hold")


def other_best(path: Path) -> None:
    amend(path, best={"step": 10, "set": "val", "loss": 9.5})


def other_rows(path: Path) -> None:
    file = path / "metrics/000.ndjson"
    file.write_text(file.read_text().replace('"loss":3.0', '"loss":4.0'))


def no_rows(path: Path) -> None:
    (path / "metrics/000.ndjson").unlink()
    (path / "events.ndjson").unlink()
    other_weights(path)


def other_config(path: Path) -> None:
    (path / "config.yaml").write_text("lr: {learning_rate: 100.0}\n")


def other_status(path: Path) -> None:
    amend(path, status="crashed")


def other_start(path: Path) -> None:
    amend(path, seed=999)


def other_command(path: Path) -> None:
    (part,) = json.loads((path / "run.json").read_text())["segments"]
    amend(path, segments=[{**part, "command": ["evil"]}])


def more_rows_and_other_weights(path: Path) -> None:
    """A continuation, which has the weights of the steps before it too."""
    other_weights(path)
    record = Record.reopen(path, command=["rung", "resume"])
    steps(record, 20, 30)
    record.finish("stopped")


FORGERIES: list[Callable[[Path], None]] = [
    other_weights, other_verdict, other_best, other_rows, no_rows, other_config, other_status, other_start,
    other_command, more_rows_and_other_weights,
]  # fmt: skip


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_a_run_that_does_not_continue_the_one_here_replaces_nothing(
    s3: str, tmp_path: Path, forge: Callable[[Path], None]
) -> None:
    here = lined(tmp_path / "here")
    before = contents(here)
    push_run(Bucket(s3, is_new=True), here, "all")
    pull_run(Bucket(s3), "piano/1", tmp_path / "theirs")
    forge(tmp_path / "theirs/piano/1")
    push_run(Bucket(s3), tmp_path / "theirs/piano/1", "all", options=PushOptions(is_forced=True))
    with pytest.raises(Exception, match="--as") as caught:
        pull_run(Bucket(s3), "piano/1", tmp_path / "here")
    assert getattr(caught.value, "code", "") in ("run-differs", "run-newer")
    assert contents(here) == before

    done = pull_run(Bucket(s3), "piano/1", tmp_path / "here", PullOptions(experiment="theirs"))
    assert (done.name, done.what) == ("theirs/1", "new")
    both = {run.id: run.document for run in list_runs(tmp_path / "here")}
    assert both["theirs/1"]["copy_of"] == both["piano/1"]["uid"] != both["theirs/1"]["uid"]
    assert contents(here) == before

    pull_run(Bucket(s3), "piano/1", tmp_path / "here", PullOptions(is_forced=True))
    assert contents(here) != before
    (trashed,) = (tmp_path / "here/.trash").glob("piano.1/run")
    assert {name: data for name, data in contents(trashed).items() if name != "run.json"} == {
        name: data for name, data in before.items() if name != "run.json"
    }


def test_what_continues_a_run_updates_it(s3: str, tmp_path: Path) -> None:
    here = lined(tmp_path / "here")
    push_run(Bucket(s3, is_new=True), here, "all")
    pull_run(Bucket(s3), "piano/1", tmp_path / "theirs")
    there = tmp_path / "theirs/piano/1"

    def comes() -> Any:
        push_run(Bucket(s3), there, "all")
        assert pull_run(Bucket(s3), "piano/1", tmp_path / "here").what == "updated"
        return open_run("piano/1", tmp_path / "here").document

    record = Record.reopen(there, command=["rung", "resume"])
    steps(record, 20, 30)
    record.event("eval", step=30, results={"val": {"loss": 2.0}})
    record.finish("finished", best={"step": 30, "set": "val", "loss": 2.0})
    save(there, 30)
    assert comes()["best"]["loss"] == 2.0
    append_event(there, "verdict", text="no")
    amend(there, verdict="no")
    assert comes()["verdict"] == "no"
    amend(there, tags=["good"])
    assert comes()["tags"] == ["good"]
    (there / "report.md").write_text("# a page\n")
    assert comes()["tags"] == ["good"]
    (there / "checkpoints/pinned").write_text("10\n")
    assert comes()
