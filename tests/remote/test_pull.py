"""If this fails, a pull leaves half of an item, brings a damaged one, loses what only the run here has, or takes the
number of another run."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rung.remote import pull as pulls
from rung.remote.bucket import Bucket
from rung.remote.manifest import Manifest
from rung.remote.pull import PullOptions, pull_data, pull_run
from rung.remote.push import PushOptions, push, push_run
from rung.runs.maintenance.trash import restore
from rung.runs.query import list_runs, open_run
from rung.runs.record import Record, amend, append_event
from tests.errors import raises_code
from tests.remote.items import contents, finished, save, start, steps, tree
from tests.remote.servers import Asked, Proxy

OTHER = b'{"schema": 1, "id": "piano/1", "uid": "that of another"}'


def pushed(place: str, root: Path) -> Bucket:
    bucket = Bucket(place, is_new=True)
    push_run(bucket, finished(root).path, "all")
    return bucket


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith((".part", ".tmp", ".old"))]


def test_a_run_comes_back_as_it_was(place: str, tmp_path: Path) -> None:
    bucket = pushed(place, tmp_path / "ours")
    done = pull_run(bucket, "piano/1", tmp_path / "back")
    ours = {p: d for p, d in contents(tmp_path / "ours/piano/1").items() if p != "heartbeat" and "columns" not in p}
    assert contents(done.path) == ours
    assert open_run("piano/1", tmp_path / "back").status == "finished"
    assert (tmp_path / "back/piano/.last").read_text() == "1\n"
    assert not leftovers(tmp_path / "back")
    again = pull_run(bucket, "piano/1", tmp_path / "back")
    assert (again.what, again.received_bytes) == ("unchanged", 0)
    assert start(tmp_path / "back").id == "piano/2"


def test_a_damaged_file_is_found_and_nothing_lands(place: str, tmp_path: Path) -> None:
    bucket = pushed(place, tmp_path / "ours")
    key, size = next((k, s) for k, s in bucket.sizes("runs").items() if "config.yaml" in k)
    for damage in (b"q" * size, b"short", b"q" * (size + 9), b""):
        bucket.send(key, lambda damage=damage: iter([damage]), len(damage))  # type: ignore[misc]
        with raises_code("item-damaged"):
            pull_run(bucket, "piano/1", tmp_path / "back")
        assert list_runs(tmp_path / "back") == []
        assert not (tmp_path / "back/piano/1").exists()
    push_run(bucket, tmp_path / "ours/piano/1", "all", options=PushOptions(is_verified=True))
    pull_run(bucket, "piano/1", tmp_path / "back")
    assert not leftovers(tmp_path / "back")


def test_a_missing_file_is_found_and_nothing_lands(place: str, tmp_path: Path) -> None:
    bucket = pushed(place, tmp_path / "ours")
    bucket.delete([next(key for key in bucket.sizes("runs") if "optimizer.pt" in key)])
    with raises_code("item-damaged"):
        pull_run(bucket, "piano/1", tmp_path / "back")
    assert not (tmp_path / "back/piano/1").exists()


def test_a_pull_goes_on_where_it_was(between: Proxy, s3: str, tmp_path: Path) -> None:
    files = {f"{i:02d}.bin": os.urandom(4000 + i) for i in range(12)}
    push(Bucket(s3), tree(tmp_path / "here", files))
    got: list[str] = []

    def fault(asked: Asked) -> str | None:
        if asked.method == "GET" and "/files/" in asked.path:
            got.append(asked.path)
            return "403" if len(got) > 7 else None
        return None

    between.fault = fault
    with raises_code("no-permission"):
        pull_data(Bucket(s3), "tunes", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    between.fault = lambda asked: None
    done = pull_data(Bucket(s3), "tunes", tmp_path / "back")
    assert contents(tmp_path / "back") == files
    assert done.received_bytes <= sum(map(len, files.values())) - 5 * 4000
    assert not leftovers(tmp_path)


def test_a_pull_over_one_that_was_killed_trusts_no_file_of_it(place: str, tmp_path: Path) -> None:
    bucket = Bucket(place, is_new=True)
    files = {"a.bin": b"a" * 500, "b/c.bin": b"c" * 700}
    snapshot = tree(tmp_path / "here", files)
    push(bucket, snapshot)
    import hashlib

    digest = hashlib.sha256(snapshot.uid.encode()).hexdigest()[:8]
    parcel = tmp_path / f".pull-back-{digest}.0.part"
    (parcel / "files/b").mkdir(parents=True)
    (parcel / "incoming").mkdir()
    (parcel / "files/a.bin").write_bytes(b"x" * 500)  # the right size, another content
    (parcel / "files/b/c.bin").write_bytes(b"c" * 700)
    (parcel / "files/old.bin").write_bytes(b"of an earlier state")
    (parcel / "incoming/half").write_bytes(b"half")
    done = pull_data(bucket, "tunes", tmp_path / "back")
    assert contents(tmp_path / "back") == files
    assert done.received_bytes == 500
    assert not leftovers(tmp_path)


def test_a_kill_between_the_two_renames_is_mended(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = pushed(place, tmp_path / "ours")
    root = tmp_path / "back"
    pull_run(bucket, "piano/1", root)
    append_event(tmp_path / "ours/piano/1", "note", text="new")
    push_run(bucket, tmp_path / "ours/piano/1", "all")
    rename = os.rename

    class Killed(BaseException):
        pass

    def killed(old: Path, new: Path) -> None:
        if str(old).endswith("/files"):
            raise Killed
        if str(old).endswith(".old"):
            raise Killed  # nor is there anybody left to put it back
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(pulls, "exchange", lambda a, b: False)  # as on a disk that cannot
        patch.setattr(os, "rename", killed)
        with pytest.raises(Killed):
            pull_run(bucket, "piano/1", root)
    assert not (root / "piano/1").exists()
    done = pull_run(bucket, "piano/1", root)
    assert done.what == "updated"
    assert [event["text"] for event in open_run("piano/1", root).events("note")] == ["new"]
    assert not leftovers(root)


def test_another_run_of_the_same_number_is_left_alone(place: str, tmp_path: Path) -> None:
    bucket, root = pushed(place, tmp_path / "theirs"), tmp_path / "ours"
    mine = finished(root)
    before = contents(mine.path)
    with raises_code("run-exists") as caught:
        pull_run(bucket, "piano/1", root)
    assert "`--as piano`" in str(caught.value)
    done = pull_run(bucket, "piano/1", root, PullOptions(experiment="piano"))
    assert done.name == "piano/2"
    assert contents(mine.path) == before
    theirs = open_run("piano/2", root)
    assert (theirs.id, theirs.document["number"], theirs.document["formerly"]) == ("piano/2", 2, ["piano/1"])
    assert theirs.document["uid"] == open_run("piano/1", tmp_path / "theirs").document["uid"]
    with raises_code("run-exists") as caught:
        pull_run(bucket, "piano/1", root, PullOptions(experiment="other"))
    assert "piano/2" in str(caught.value)
    assert not (root / "other").exists()
    assert start(root).id == "piano/3"


def test_a_run_that_was_renamed_here_is_updated_under_its_name(place: str, tmp_path: Path) -> None:
    bucket, root = pushed(place, tmp_path / "ours"), tmp_path / "back"
    pull_run(bucket, "piano/1", root, PullOptions(experiment="theirs"))
    append_event(tmp_path / "ours/piano/1", "note", text="later")
    push_run(bucket, tmp_path / "ours/piano/1", "all")
    done = pull_run(bucket, "piano/1", root)
    assert (done.name, done.what) == ("theirs/1", "updated")
    run = open_run("theirs/1", root)
    assert (run.id, run.document["formerly"]) == ("theirs/1", ["piano/1"])
    assert [event["text"] for event in run.events("note")] == ["later"]
    assert len(list_runs(root)) == 1


def test_an_update_brings_only_what_is_new_and_keeps_what_only_we_have(place: str, tmp_path: Path) -> None:
    bucket, root = pushed(place, tmp_path / "ours"), tmp_path / "back"
    pull_run(bucket, "piano/1", root)
    own = root / "piano/1/report.md"
    own.write_text("my page")
    save(root / "piano/1", 15)
    record = Record.reopen(tmp_path / "ours/piano/1", command=["rung", "resume"])
    steps(record, 20, 30)
    save(record.path, 30)
    record.finish("finished")
    push_run(bucket, record.path)
    done = pull_run(bucket, "piano/1", root)
    assert done.what == "updated"
    run = open_run("piano/1", root)
    assert run.step == 29
    assert own.read_text() == "my page"
    assert [int(name) for name in run.checkpoints()] == [10, 15, 20, 30]
    assert done.received_bytes < done.bytes - 4000, "the checkpoint that was here was brought again"
    assert not leftovers(root)


def test_what_is_later_here_is_not_overwritten(place: str, tmp_path: Path) -> None:
    bucket, root = pushed(place, tmp_path / "ours"), tmp_path / "back"
    pull_run(bucket, "piano/1", root)
    append_event(root / "piano/1", "note", text="only here")
    append_event(tmp_path / "ours/piano/1", "note", text="only there")
    push_run(bucket, tmp_path / "ours/piano/1", "all")
    with raises_code("run-newer"):
        pull_run(bucket, "piano/1", root)
    record = Record.reopen(root / "piano/1", command=["rung", "resume"])
    steps(record, 20, 25)
    with raises_code("wrong-state"):
        pull_run(bucket, "piano/1", root, PullOptions(is_forced=True))
    record.finish("stopped")
    before = contents(root / "piano/1")
    with raises_code("run-newer"):
        pull_run(bucket, "piano/1", root)
    assert contents(root / "piano/1") == before
    pull_run(bucket, "piano/1", root, PullOptions(is_forced=True))
    assert open_run("piano/1", root).step == 19
    shutil.rmtree(root / "piano/1")
    restore(root, ["piano/1"])  # what was given up can be had back
    assert open_run("piano/1", root).step == 24


def test_many_runs_are_brought_with_one_look_at_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand looks at a thousand runs take a minute; and the same run under two names is still one."""
    bucket, root = Bucket(str(tmp_path / "there"), is_new=True), tmp_path / "back"
    run = finished(tmp_path / "ours")
    push_run(bucket, run.path)
    shutil.copytree(run.path, tmp_path / "ours/violin/1")
    amend(tmp_path / "ours/violin/1", id="violin/1", experiment="violin")
    push_run(bucket, tmp_path / "ours/violin/1")
    known = pulls.runs_by_uid(root)
    monkeypatch.setattr(pulls, "list_runs", lambda *args, **options: pytest.fail("looked again"))
    assert pull_run(bucket, "piano/1", root, known=known).name == "piano/1"
    again = pull_run(bucket, "violin/1", root, known=known)
    assert (again.name, again.what) == ("piano/1", "updated")
    assert not (root / "violin").exists()


def pull_while(monkeypatch: pytest.MonkeyPatch, bucket: Bucket, root: Path, happens: Callable[[], object]) -> None:
    """A pull that takes long enough for something to happen here."""
    download = pulls.download

    def slowly(*args: Any) -> Manifest:
        manifest = download(*args)
        happens()
        return manifest

    with monkeypatch.context() as patch:
        patch.setattr(pulls, "download", slowly)
        pull_run(bucket, "piano/1", root)


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_run_that_is_resumed_while_it_is_brought_is_left_alone(
    place: str, tmp_path: Path, has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, root = pushed(place, tmp_path / "ours"), tmp_path / "back"
    pull_run(bucket, "piano/1", root)
    append_event(tmp_path / "ours/piano/1", "note", text="later")
    push_run(bucket, tmp_path / "ours/piano/1", "all")
    records: list[Record] = []

    def resume() -> None:
        records.append(Record.reopen(root / "piano/1", command=["rung", "resume"]))
        steps(records[0], 20, 25)
        if has_ended:
            records[0].finish("stopped")

    with raises_code("run-newer" if has_ended else "wrong-state"):
        pull_while(monkeypatch, bucket, root, resume)
    assert open_run("piano/1", root).step == 24
    assert not records[0].path.with_name(".pull-1.old").exists()


def test_a_verdict_that_only_we_have_stays(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, root = pushed(place, tmp_path / "ours"), tmp_path / "back"
    pull_run(bucket, "piano/1", root)
    amend(root / "piano/1", tags=["mine"])
    append_event(tmp_path / "ours/piano/1", "note", text="later")
    push_run(bucket, tmp_path / "ours/piano/1", "all")
    pull_while(monkeypatch, bucket, root, lambda: amend(root / "piano/1", verdict="it went up"))
    run = open_run("piano/1", root)
    assert (run.document["verdict"], run.document["tags"]) == ("it went up", ["mine"])
    assert [event["text"] for event in run.events("note")] == ["later"]


def test_a_run_with_a_link_out_of_it_is_left_alone(place: str, tmp_path: Path) -> None:
    bucket, root = pushed(place, tmp_path / "ours"), tmp_path / "back"
    pull_run(bucket, "piano/1", root)
    (root / "piano/1/checkpoints").rename(tmp_path / "disk")
    (root / "piano/1/checkpoints").symlink_to(tmp_path / "disk")
    save(root / "piano/1", 15)
    append_event(tmp_path / "ours/piano/1", "note", text="later")
    push_run(bucket, tmp_path / "ours/piano/1", "all")
    before = contents(tmp_path / "disk")
    for force in (False, True):
        with raises_code("leads-out") as caught:
            pull_run(bucket, "piano/1", root, PullOptions(is_forced=force))
        assert str(root / "piano/1/checkpoints") in str(caught.value)
    assert contents(tmp_path / "disk") == before


def test_saves_of_another_future_are_set_aside(place: str, tmp_path: Path) -> None:
    """Elsewhere the run went on from step 12; the save of step 15 here is of a run that it is no more."""
    bucket, root = pushed(place, tmp_path / "ours"), tmp_path / "back"
    pull_run(bucket, "piano/1", root)
    save(root / "piano/1", 11)
    save(root / "piano/1", 15)
    shutil.rmtree(tmp_path / "ours/piano/1/checkpoints/00000020")
    record = Record.reopen(tmp_path / "ours/piano/1", command=["rung", "resume", "--at", "12"])
    steps(record, 12, 14)
    record.finish("stopped")
    push_run(bucket, record.path, options=PushOptions(is_forced=True))
    pull_run(bucket, "piano/1", root)
    assert 15 not in [int(name) for name in open_run("piano/1", root).checkpoints()]
    assert 11 in [int(name) for name in open_run("piano/1", root).checkpoints()]
    assert (root / "piano/1/checkpoints/aside-pulled/00000015/manifest.json").is_file()


@pytest.mark.parametrize(
    "text", [b"{}", b"[]", b"not json", b'{"schema":1,"id":5}', b'{"schema":99,"id":"a/1"}', OTHER, None],
)  # fmt: skip
def test_an_item_that_is_no_run_is_one_sentence_and_does_not_land(tmp_path: Path, text: bytes | None) -> None:
    bucket = Bucket(str(tmp_path / "there"), is_new=True)
    files = tree(tmp_path / "odd", {"config.yaml": b"a: 1\n", **({} if text is None else {"run.json": text})})
    push(bucket, replace(files, kind="run", name="piano/1", uid="u"))
    with raises_code("run-damaged") as caught:
        pull_run(bucket, "piano/1", tmp_path / "back")
    assert "\n" not in str(caught.value)
    assert list_runs(tmp_path / "back") == []
    assert not (tmp_path / "back/piano/1").exists()


def test_no_more_is_received_than_the_manifest_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object may be as large as the disk."""
    bucket = Bucket(str(tmp_path / "there"), is_new=True)
    push(bucket, tree(tmp_path / "here", {"a.bin": b"abc"}))
    num_pieces = 0

    def endless(self: Bucket, key: str) -> Iterator[bytes]:
        nonlocal num_pieces
        for num_pieces in range(1, 100):  # noqa: B007
            yield b"abc"

    monkeypatch.setattr(Bucket, "receive", endless)
    with raises_code("item-damaged"):
        pull_data(bucket, "tunes", tmp_path / "back")
    assert num_pieces == 2


def test_a_copy_of_a_running_run_can_be_updated(place: str, tmp_path: Path) -> None:
    """The copy says running, and its process is alive; but it runs elsewhere."""
    record, bucket = start(tmp_path / "ours"), Bucket(place, is_new=True)
    for end in (5, 9):
        steps(record, end - 3, end)
        push_run(bucket, record.path)
        pull_run(bucket, "piano/1", tmp_path / "back")
        assert open_run("piano/1", tmp_path / "back").step == end - 1


@pytest.mark.parametrize(("word", "expected"), [("all", [10, 20]), ("best", [10]), ("last", [20]), ("none", [])])
def test_which_checkpoints_come(place: str, tmp_path: Path, word: str, expected: list[int]) -> None:
    bucket = pushed(place, tmp_path / "ours")
    pull_run(bucket, "piano/1", tmp_path / "back", PullOptions(word))
    assert [int(name) for name in open_run("piano/1", tmp_path / "back").checkpoints()] == expected


def test_data_that_is_here_is_replaced_only_when_asked(place: str, tmp_path: Path) -> None:
    bucket = Bucket(place, is_new=True)
    push(bucket, tree(tmp_path / "here", {"a.bin": b"new"}))
    tree(tmp_path / "mine", {"thesis.tex": b"years of work"})
    with raises_code("folder-exists"):
        pull_data(bucket, "tunes", tmp_path / "mine", PullOptions(is_forced=True))
    assert contents(tmp_path / "mine") == {"thesis.tex": b"years of work"}
    old = {"a.bin": b"old", "b.bin": b"old", "manifest.json": b"{}"}
    tree(tmp_path / "back", old)
    with raises_code("data-exists"):
        pull_data(bucket, "tunes", tmp_path / "back")
    assert contents(tmp_path / "back") == old
    pull_data(bucket, "tunes", tmp_path / "back", PullOptions(is_forced=True))
    assert contents(tmp_path / "back") == {"a.bin": b"new"}
    assert pull_data(bucket, "tunes", tmp_path / "back").what == "unchanged"


def test_what_is_not_there_leaves_no_trace(place: str, tmp_path: Path) -> None:
    bucket = Bucket(place, is_new=True)
    for pull in (lambda: pull_run(bucket, "piano/1", tmp_path / "x"), lambda: pull_data(bucket, "t", tmp_path / "x/t")):
        with raises_code("no-item"):
            pull()
        assert not (tmp_path / "x").exists()


def test_two_pulls_at_once_are_one(between: Proxy, s3: str, tmp_path: Path) -> None:
    push(Bucket(s3), tree(tmp_path / "here", {"a.bin": b"a"}))
    is_in, may_go = threading.Event(), threading.Event()

    def before(asked: Asked) -> None:
        if "/files/" in asked.path and asked.method == "GET":
            is_in.set()
            may_go.wait(30)

    between.before = before
    first = threading.Thread(target=lambda: pull_data(Bucket(s3), "tunes", tmp_path / "back"))
    first.start()
    assert is_in.wait(30)
    with raises_code("in-use"):
        pull_data(Bucket(s3), "tunes", tmp_path / "back")
    may_go.set()
    first.join()
    assert contents(tmp_path / "back") == {"a.bin": b"a"}


def test_whoever_pulls_during_a_push_has_the_old_item_or_the_new_one(
    between: Proxy, server: str, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pull at every request of a push that changes the item."""
    old = {"same.bin": b"same", "changed.bin": b"old", "gone.bin": b"gone"}
    new = {"same.bin": b"same", "changed.bin": b"new", "come.bin": b"come"}
    push(Bucket(s3), tree(tmp_path / "old", old))
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    direct = Bucket(s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", between.address)
    seen: list[dict[str, bytes]] = []
    problems: list[BaseException] = []

    def before(asked: Asked) -> None:
        target = tmp_path / f"at-{asked.number}"
        try:
            pull_data(direct, "tunes", target)
            seen.append(contents(target))
        except BaseException as error:
            problems.append(error)

    between.before = before
    push(Bucket(s3), tree(tmp_path / "new", new), PushOptions(is_forced=True))
    assert not problems
    assert all(found in (old, new) for found in seen)
    assert old in seen
    assert new in seen


def test_an_item_that_is_replaced_while_it_is_brought(
    between: Proxy, server: str, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of the old manifest go under the reader's hands; it goes on with the new one."""
    push(Bucket(s3), tree(tmp_path / "old", {"a.bin": b"old", "b.bin": b"both"}, uid="u"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    direct = Bucket(s3)
    is_done = threading.Lock()

    def before(asked: Asked) -> None:
        if "/files/" in asked.path and asked.method == "GET" and is_done.acquire(blocking=False):
            push(
                direct,
                tree(tmp_path / "new", {"a.bin": b"new", "b.bin": b"both"}, uid="u"),
                PushOptions(is_forced=True),
            )

    monkeypatch.setenv("AWS_ENDPOINT_URL", between.address)
    between.before = before
    pull_data(Bucket(s3), "tunes", tmp_path / "back")
    assert contents(tmp_path / "back") in ({"a.bin": b"new", "b.bin": b"both"}, {"a.bin": b"old", "b.bin": b"both"})
