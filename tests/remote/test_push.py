"""If this fails, a push shows half of an item, mixes two, sends what is there already, or removes what somebody
needs."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rung.remote import snapshot as snapshots
from rung.remote.bucket import Bucket, RemoteError, WriteConflict
from rung.remote.manifest import read_manifest
from rung.remote.pull import PullOptions, pull_data, pull_run
from rung.remote.push import PushOptions, delete, push, push_run
from rung.remote.snapshot import snapshot_run, step_of
from rung.runs.query import open_run
from rung.runs.record import amend, append_event
from tests.errors import raises_code
from tests.remote.items import contents, finished, save, start, steps, tree
from tests.remote.servers import Asked, Proxy
from tests.remote.test_manifest import NAMES

TREES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.binary(max_size=300), max_size=6)


def is_tree(files: dict[str, bytes]) -> bool:
    folders = {"/".join(path.split("/")[:i]) for path in files for i in range(1, path.count("/") + 1)}
    names = [part.encode() for path in files for part in path.split("/")]
    is_hidden = any(name.startswith(b".") for name in names)  # no data has such files, and no pull takes them
    return not is_hidden and not folders & set(files) and all(len(name) <= 255 for name in names)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=TREES.filter(is_tree))
@example(files={"Infinity": b"", "NaN/-Infinity": b"1"})
def test_any_tree_of_files_comes_back_as_it_was(place: str, files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bucket = Bucket(place, is_new=True)
        pushed = push(bucket, tree(Path(folder, "here"), files), PushOptions(is_forced=True))
        assert pushed.num_files == len(files)
        pull_data(bucket, "tunes", Path(folder, "back"))
        assert contents(Path(folder, "back")) == files
        keys = bucket.sizes("data/tunes")
        assert len(keys) == len(files) + 1, "files of earlier examples were not removed"


def test_what_is_there_is_not_sent_again(between: Proxy, s3: str, tmp_path: Path) -> None:
    bucket, files = Bucket(s3), {f"{i}.bin": os.urandom(5000) for i in range(6)}
    assert push(bucket, tree(tmp_path, files)).num_sent == 6
    between.asked.clear()
    again = push(bucket, tree(tmp_path, files))
    assert (again.num_sent, again.sent_bytes, between.puts()) == (0, 0, [])
    more = push(bucket, tree(tmp_path, {**files, "new.bin": b"new"}), PushOptions(is_forced=True))
    assert (more.num_sent, more.sent_bytes) == (1, 3)


def test_of_rows_only_the_new_ones_are_sent(
    between: Proxy, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a push that was cut off, and until there are too many pieces; what is pulled is the same file."""
    monkeypatch.setattr(snapshots, "_MOST_PIECES", 4)
    bucket, record = Bucket(s3), start(tmp_path / "runs")
    file, place = record.path / "metrics/000.ndjson", "runs/piano/1/files/metrics/000.ndjson"
    steps(record, 0, 2000)
    push_run(bucket, record.path)
    before = file.stat().st_size
    assert before > 100_000
    for number in range(1, 6):
        steps(record, 2000 + number * 50, 2050 + number * 50)
        now = file.stat().st_size
        between.asked.clear()
        push_run(bucket, record.path)
        sent = sum(one.num_bytes for one in between.asked if "metrics" in one.path and one.method == "PUT")
        assert sent == (now - before if number != 4 else now), "whole once more, when there are four pieces"
        before = now
        pull_run(bucket, "piano/1", tmp_path / "back")
        assert (tmp_path / "back/piano/1/metrics/000.ndjson").read_bytes() == file.read_bytes()
        assert sum(size for key, size in bucket.sizes("runs").items() if key.startswith(place)) == now
    record.finish("finished")
    assert push_run(bucket, record.path).num_sent < 5
    pull_run(bucket, "piano/1", tmp_path / "back")
    found = read_manifest(bucket, "run", "piano/1")
    assert found is not None
    pieces = [piece for piece in found[0].pieces if piece.path == "metrics/000.ndjson"]
    assert len(pieces) == 2
    bucket.delete([found[0].key(pieces[-1])])
    assert push_run(bucket, record.path).num_sent == 1
    bucket.send(found[0].key(pieces[0]), lambda: iter([b"x" * pieces[0].bytes]), pieces[0].bytes)
    assert push_run(bucket, record.path, options=PushOptions(is_verified=True)).num_sent == 0
    pull_run(bucket, "piano/1", tmp_path / "again")
    assert (tmp_path / "again/piano/1/metrics/000.ndjson").read_bytes() == file.read_bytes()


def test_a_push_asks_for_the_list_of_files_a_few_times(between: Proxy, s3: str, tmp_path: Path) -> None:
    """And not once for each file."""
    push(Bucket(s3), tree(tmp_path, {f"{i}.bin": b"x" for i in range(30)}))
    assert sum("list-type" in asked.path for asked in between.asked) <= 3


def test_a_file_that_went_there_is_sent_again(place: str, tmp_path: Path) -> None:
    bucket, snapshot = Bucket(place, is_new=True), tree(tmp_path / "here", {"a.bin": b"a", "b.bin": b"b"})
    push(bucket, snapshot)
    bucket.delete([next(key for key in bucket.sizes("data") if "a.bin" in key)])
    assert push(bucket, snapshot).num_sent == 1
    pull_data(bucket, "tunes", tmp_path / "back")
    assert contents(tmp_path / "back") == {"a.bin": b"a", "b.bin": b"b"}


def meet_at_the_manifest(between: Proxy) -> None:
    """Two pushes are held until both are about to write their manifest."""
    barrier = threading.Barrier(2)

    def before(asked: Asked) -> None:
        if asked.method == "PUT" and "manifest.json" in asked.path:
            barrier.wait(30)

    between.before = before


def race(bucket_of: list[Bucket], snapshots: list, is_forced: bool = False) -> list[BaseException | None]:  # type: ignore[type-arg]
    ends: list[BaseException | None] = [None, None]

    def one(number: int) -> None:
        try:
            push(bucket_of[number], snapshots[number], PushOptions(is_forced=is_forced))
        except BaseException as error:
            ends[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


@pytest.mark.parametrize("is_update", [False, True], ids=["new", "update"])
def test_of_two_who_push_at_once_exactly_one_wins(between: Proxy, s3: str, tmp_path: Path, is_update: bool) -> None:
    if is_update:
        push(Bucket(s3), tree(tmp_path / "before", {"common.bin": b"before"}))
    states = [{"own.bin": b"one" * 100, "common.bin": b"c"}, {"own.bin": b"two" * 100, "common.bin": b"c"}]
    snapshots = [tree(tmp_path / str(i), files) for i, files in enumerate(states)]
    meet_at_the_manifest(between)
    ends = race([Bucket(s3), Bucket(s3)], snapshots, is_forced=is_update)
    between.before = lambda asked: None
    losers = [number for number, end in enumerate(ends) if end is not None]
    assert len(losers) == 1, ends
    assert isinstance(ends[losers[0]], WriteConflict)
    assert "Push again" in str(ends[losers[0]])
    pull_data(Bucket(s3), "tunes", tmp_path / "back")
    assert contents(tmp_path / "back") == states[1 - losers[0]]


@pytest.mark.parametrize("is_update", [False, True], ids=["new", "update"])
def test_the_same_in_a_folder(tmp_path: Path, is_update: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(tmp_path / "there")
    if is_update:
        push(Bucket(place, is_new=True), tree(tmp_path / "before", {"common.bin": b"before"}))
    states = [{"own.bin": b"one"}, {"own.bin": b"two"}]
    snapshots = [tree(tmp_path / str(i), files) for i, files in enumerate(states)]
    barrier, write = threading.Barrier(2), Bucket.write

    def together(self: Bucket, key: str, data: bytes, before: object) -> None:
        barrier.wait(30)
        write(self, key, data, before)  # type: ignore[arg-type]

    monkeypatch.setattr(Bucket, "write", together)
    ends = race([Bucket(place, is_new=True), Bucket(place, is_new=True)], snapshots, is_forced=is_update)
    losers = [number for number, end in enumerate(ends) if end is not None]
    assert len(losers) == 1, ends
    assert isinstance(ends[losers[0]], WriteConflict)
    pull_data(Bucket(place), "tunes", tmp_path / "back")
    assert contents(tmp_path / "back") == states[1 - losers[0]]


def test_a_file_that_changes_under_our_hands_is_not_sent(place: str, tmp_path: Path) -> None:
    bucket = Bucket(place, is_new=True)
    snapshot = tree(tmp_path, {"a.bin": b"x" * 1000, "b.bin": b"y"})
    for changed in (b"z" * 1000, b"short", b"x" * 1000 + b"longer"):
        (tmp_path / "a.bin").write_bytes(changed)
        if changed.startswith(b"x"):  # only what its hash is of is sent
            push(bucket, snapshot)
            continue
        with raises_code("file-changed") as caught:
            push(bucket, snapshot)
        assert "a.bin" in str(caught.value)
        assert read_manifest(bucket, "data", "tunes") is None
    pull_data(bucket, "tunes", tmp_path / "back")
    assert contents(tmp_path / "back")["a.bin"] == b"x" * 1000


def test_verify_finds_and_mends_what_is_damaged_there(place: str, tmp_path: Path) -> None:
    bucket = Bucket(place, is_new=True)
    snapshot = tree(tmp_path / "here", {"a.bin": b"x" * 1000, "b.bin": b"y"})
    push(bucket, snapshot)
    key = next(key for key in bucket.sizes("data") if "a.bin" in key)
    bucket.send(key, lambda: iter([b"q" * 1000]), 1000)
    push(bucket, snapshot)  # sizes alone do not tell
    with raises_code("item-damaged"):
        pull_data(bucket, "tunes", tmp_path / "back")
    push(bucket, snapshot, PushOptions(is_verified=True))
    pull_data(bucket, "tunes", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "here")


def test_a_run_is_never_replaced_by_another_or_by_an_earlier_state(place: str, tmp_path: Path) -> None:
    bucket, ours, theirs = Bucket(place, is_new=True), tmp_path / "ours", tmp_path / "theirs"
    push_run(bucket, finished(ours).path)
    with raises_code("run-exists"):
        push_run(bucket, finished(theirs).path)
    pull_run(bucket, "piano/1", tmp_path / "copy")
    from rung.runs.record import Record

    record = Record.reopen(ours / "piano/1", command=["rung", "resume"])
    steps(record, 20, 30)
    record.finish("finished")
    push_run(bucket, record.path)
    with raises_code("run-newer"):
        push_run(bucket, tmp_path / "copy/piano/1")
    push_run(bucket, tmp_path / "copy/piano/1", options=PushOptions(is_forced=True))


def test_what_somebody_else_wrote_there_is_not_lost(place: str, tmp_path: Path) -> None:
    """Two copies of a run, a note or a verdict in each."""
    bucket, ours, theirs = Bucket(place, is_new=True), tmp_path / "ours", tmp_path / "theirs"
    push_run(bucket, finished(ours).path)
    pull_run(bucket, "piano/1", theirs)
    append_event(theirs / "piano/1", "note", text="theirs")
    push_run(bucket, theirs / "piano/1")
    append_event(ours / "piano/1", "note", text="a longer note, and it is ours")
    with raises_code("run-newer") as caught:
        push_run(bucket, ours / "piano/1")
    assert "events.ndjson" in str(caught.value)
    pull_run(bucket, "piano/1", ours, PullOptions(is_forced=True))
    amend(theirs / "piano/1", verdict="it went up")
    push_run(bucket, theirs / "piano/1")
    append_event(ours / "piano/1", "note", text="ours, after theirs")
    with raises_code("run-newer") as caught:
        push_run(bucket, ours / "piano/1")
    assert "verdict" in str(caught.value)
    push_run(bucket, ours / "piano/1", options=PushOptions(is_forced=True))
    amend(ours / "piano/1", verdict="no, it did not")
    push_run(bucket, ours / "piano/1")
    amend(ours / "piano/1", verdict="a little")  # who changes a verdict knows of it
    push_run(bucket, ours / "piano/1")


def saved(bucket: Bucket, name: str = "piano/1") -> set[int]:
    found = read_manifest(bucket, "run", name)
    assert found is not None
    return {step for entry in found[0].entries if (step := step_of(entry.path)) is not None}


@pytest.mark.parametrize(
    ("word", "expected"),
    [("kept", {10, 40, 20}), ("best", {10}), ("last", {40}), ("all", {10, 20, 30, 40}), ("none", set())],
)
def test_which_checkpoints_go(place: str, tmp_path: Path, word: str, expected: set[int]) -> None:
    run = finished(tmp_path / "runs", saves=(10, 20, 30, 40))
    (run.path / "checkpoints/pinned").write_text("20\n")
    bucket = Bucket(place, is_new=True)
    push_run(bucket, run.path, word)
    assert saved(bucket) == expected


def test_checkpoints_that_were_never_brought_here_stay_there(place: str, tmp_path: Path) -> None:
    """A pull without checkpoints, a note, a push: the weights must still be there."""
    bucket = Bucket(place, is_new=True)
    push_run(bucket, finished(tmp_path / "ours").path)
    for word in ("none", "best", "last"):
        copy = tmp_path / word
        pull_run(bucket, "piano/1", copy, PullOptions(word))
        append_event(copy / "piano/1", "note", text=f"seen with {word}")
        push_run(bucket, copy / "piano/1")
        assert saved(bucket) == {10, 20}, word
    pull_run(bucket, "piano/1", tmp_path / "back")
    assert [event["text"] for event in open_run("piano/1", tmp_path / "back").events("note")][-1] == "seen with last"


def test_checkpoints_that_were_rotated_away_or_set_aside_go_there_too(place: str, tmp_path: Path) -> None:
    import shutil

    run, bucket = finished(tmp_path / "runs", saves=(10, 20, 30), best=30), Bucket(place, is_new=True)
    push_run(bucket, run.path, "all")
    assert saved(bucket) == {10, 20, 30}
    shutil.rmtree(run.path / "checkpoints/00000010")
    push_run(bucket, run.path)
    assert saved(bucket) == {30}
    (run.path / "checkpoints/aside-1").mkdir()
    (run.path / "checkpoints/00000030").rename(run.path / "checkpoints/aside-1/00000030")
    (run.path / "checkpoints/best").unlink()
    push_run(bucket, run.path)
    assert saved(bucket) == {20}


def test_folders_left_out_stay_as_they_are_there(place: str, tmp_path: Path) -> None:
    run, bucket = finished(tmp_path / "runs"), Bucket(place, is_new=True)
    push_run(bucket, run.path)
    (run.path / "samples/00000020/more.mid").write_bytes(b"MThd")
    append_event(run.path, "note", text="x")
    push_run(bucket, run.path, without=["samples"])
    found = read_manifest(bucket, "run", "piano/1")
    assert found is not None
    assert [e.path for e in found[0].entries if e.path.startswith("samples")] == ["samples/00000020/tune é.mid"]


def test_a_run_in_progress_goes_as_it_is_now(place: str, tmp_path: Path) -> None:
    record = start(tmp_path / "runs")
    steps(record, 0, 7)
    save(record.path, 5)
    (record.path / "checkpoints/.00000007.1.tmp").mkdir()
    (record.path / "checkpoints/.00000007.1.tmp/model.safetensors").write_bytes(b"half")
    (record.path / "checkpoints/00000006").mkdir()  # a save without a manifest is none
    (record.path / "checkpoints/00000006/model.safetensors").write_bytes(b"half")
    with (record.path / "metrics/000.ndjson").open("ab") as file:
        file.write(b'{"step": 7, "loss"')
    bucket = Bucket(place, is_new=True)
    push_run(bucket, record.path)
    assert saved(bucket) == {5}
    pull_run(bucket, "piano/1", tmp_path / "back")
    back = open_run("piano/1", tmp_path / "back")
    assert back.metrics(["loss"])["step"] == list(range(7))
    assert (back.path / "metrics/000.ndjson").read_bytes().endswith(b"\n")
    assert not (back.path / "heartbeat").exists()
    assert not list(back.path.rglob("*.tmp"))
    assert not list(record.path.glob(".push*"))


@pytest.mark.parametrize("is_ending", [False, True])
def test_a_run_that_goes_on_while_we_look_fits_together(
    tmp_path: Path, is_ending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come after the rows were taken; the copy says no more than it has."""
    record, add, seen = start(tmp_path / "runs"), snapshots._Files.add, list[str]()
    steps(record, 0, 7)

    def later(self: snapshots._Files, path: str) -> None:
        add(self, path)
        if path == "metrics/000.ndjson" and not seen:
            seen.append(path)
            steps(record, 7, 9)
            if is_ending:
                record.finish("finished")

    monkeypatch.setattr(snapshots._Files, "add", later)
    bucket = Bucket(str(tmp_path / "there"), is_new=True)
    push_run(bucket, record.path)
    monkeypatch.undo()
    assert seen
    found = read_manifest(bucket, "run", "piano/1")
    assert found is not None
    pull_run(bucket, "piano/1", tmp_path / "back")
    back = open_run("piano/1", tmp_path / "back")
    assert back.metrics(["loss"])["step"] == list(range(7))
    assert (found[0].document["step"], back.step, back.document["status"]) == (6, 6, "running")
    append_event(back.path, "note", text="a copy can be written on")
    push_run(bucket, back.path)


def test_a_checkpoint_that_goes_while_we_look_is_left_out_or_whole(place: str, tmp_path: Path) -> None:
    """Rotation takes a save away after it was chosen, and another while it is sent."""
    import shutil

    run = finished(tmp_path / "runs", saves=(10, 20))
    bucket = Bucket(place, is_new=True)
    with snapshot_run(run, "all") as snapshot:
        shutil.rmtree(run.path / "checkpoints/00000010")
        push(bucket, snapshot)
    assert saved(bucket) == {10, 20}
    pull_run(bucket, "piano/1", tmp_path / "back")
    back = tmp_path / "back/piano/1/checkpoints/00000010"
    assert sorted(path.name for path in back.iterdir()) == [
        "manifest.json", "model.safetensors", "optimizer.pt", "state.json",
    ]  # fmt: skip
    (run.path / "checkpoints/00000020/optimizer.pt").unlink()
    with snapshot_run(run, "all") as snapshot:
        assert not [entry for entry in snapshot.entries if step_of(entry.path) == 20]


def test_a_damaged_checkpoint_is_found_before_it_is_visible(place: str, tmp_path: Path) -> None:
    run = finished(tmp_path / "runs")
    file = run.path / "checkpoints/00000010/model.safetensors"
    file.write_bytes(os.urandom(file.stat().st_size))
    bucket = Bucket(place, is_new=True)
    with raises_code("file-changed") as caught:
        push_run(bucket, run.path)
    assert "model.safetensors" in str(caught.value)
    assert read_manifest(bucket, "run", "piano/1") is None


def test_a_run_folder_that_cannot_be_written_is_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, mkdir = finished(tmp_path / "runs"), Path.mkdir

    def refuse(self: Path, *args: object, **more: object) -> None:
        if self.name.startswith(".push"):
            raise PermissionError(13, "Permission denied")
        mkdir(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", refuse)
    bucket = Bucket(str(tmp_path / "there"), is_new=True)
    push_run(bucket, run.path)
    assert saved(bucket) == {10, 20}


def test_a_disk_without_links_is_copied_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, bucket = finished(tmp_path / "runs"), Bucket(str(tmp_path / "there"), is_new=True)

    def refuse(*args: object, **more: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with snapshot_run(run) as snapshot:
        monkeypatch.undo()
        push(bucket, snapshot)
    pull_run(bucket, "piano/1", tmp_path / "back")
    assert (tmp_path / "back/piano/1/run.json").read_bytes() == (run.path / "run.json").read_bytes()


def test_a_name_that_is_not_utf8_is_one_sentence(tmp_path: Path) -> None:
    run = finished(tmp_path / "runs")
    with open(os.fsencode(run.path) + b"/samples/00000020/\xff.mid", "wb"):
        pass
    with raises_code("bad-name"), snapshot_run(run):
        pass


def test_only_files_are_sent(tmp_path: Path) -> None:
    run, bucket = finished(tmp_path / "runs"), Bucket(str(tmp_path / "there"), is_new=True)
    with snapshot_run(run) as snapshot:
        expected = {entry.path for entry in snapshot.entries}
    os.mkfifo(run.path / "pipe")
    (run.path / "nowhere").symlink_to("absent")
    (run.path / "around").symlink_to("around")
    (run.path / "samples/up").symlink_to("..")
    pushing = threading.Thread(target=push_run, args=(bucket, run.path), daemon=True)
    pushing.start()
    pushing.join(60)
    assert not pushing.is_alive(), "somebody waits for the other end of the pipe"
    found = read_manifest(bucket, "run", "piano/1")
    assert found is not None
    assert {entry.path for entry in found[0].entries} == expected


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished(tmp_path / "runs")

    def refuse(file: Path, num_bytes: int) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(snapshots, "_hash", refuse)
    with raises_code("cannot-read"), snapshot_run(run):
        pass


def test_deleting_takes_the_manifest_first_and_can_be_said_again(between: Proxy, s3: str, tmp_path: Path) -> None:
    bucket = Bucket(s3)
    push_run(bucket, finished(tmp_path / "runs").path)
    between.asked.clear()
    num_files = delete(bucket, "run", "piano/1")
    assert num_files > 10
    assert bucket.sizes("runs") == {}
    with raises_code("no-item"):
        delete(bucket, "run", "piano/1")
    push_run(bucket, open_run("piano/1", tmp_path / "runs").path)
    seen: list[bool] = []

    def fault(asked: Asked) -> str | None:
        is_removal = asked.method == "DELETE" or "delete" in asked.path
        if is_removal:
            seen.append(True)
        return "403" if is_removal and len(seen) > 1 else None  # the second removal, that of the files

    between.fault = fault
    with pytest.raises(RemoteError):
        delete(bucket, "run", "piano/1")
    between.fault = lambda asked: None
    assert read_manifest(bucket, "run", "piano/1") is None
    assert bucket.sizes("runs")
    delete(bucket, "run", "piano/1")
    assert bucket.sizes("runs") == {}
