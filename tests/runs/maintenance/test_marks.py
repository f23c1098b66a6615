"""If this fails, a tag or a pin is not kept, or a size is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rung.engine.checkpoint import Checkpoints
from rung.errors import RunError
from rung.runs.maintenance.disk import bytes_below, freed_bytes, sum_once, usage
from rung.runs.maintenance.selection import select
from rung.runs.maintenance.tags import check_tag, retag
from rung.runs.marks import find_step, saves, set_pin
from rung.runs.query import open_run
from rung.runs.record import Record, amend, append_event
from tests.errors import raises_code
from tests.runs.maintenance.made import make_saves

Start = Callable[..., Record]


def test_tags(ended: Start, root: Path) -> None:
    record = ended(tags=["old", "x"])
    path = select(["piano"], root)[0].path
    assert retag(path, ["baseline", "x"], ["old", "none"]) == (["old", "x"], ["x", "baseline"])
    append_event(record.path, "note", text="unrelated")
    assert open_run("piano/1", root).document["tags"] == ["x", "baseline"]
    amend(record.path, tags=None)
    assert retag(path, ["a"], []) == ([], ["a"])


@given(st.text(max_size=120))
def test_a_tag_is_one_word_or_refused(text: str) -> None:
    message = ""
    tag = "none"
    try:
        tag = check_tag(text)
    except RunError as error:
        message = str(error)
    assert "\n" not in message
    assert "\x1b" not in message
    assert tag.split() == [tag]
    assert "\x1b" not in tag
    assert check_tag(tag) == tag


def test_pins_are_honoured_by_the_rotation(tmp_path: Path) -> None:
    folder = make_saves(tmp_path, 10, 20, 30, 40)
    engine = Checkpoints(folder)
    engine.mark_best(20)
    assert set_pin(folder, find_step(folder, "10", "x"), True, "x")
    assert not set_pin(folder, 10, True, "x")
    engine.clean(1)
    assert engine.steps() == [10, 20, 40]
    assert [(s.step, s.is_best, s.is_last, s.is_pinned) for s in saves(folder)] == [
        (10, False, False, True), (20, True, False, False), (40, False, True, False),
    ]  # fmt: skip
    assert set_pin(folder, find_step(folder, "10", "x"), False, "x")
    assert find_step(folder, "best", "x") == 20
    assert find_step(folder, "last", "x") == 40
    engine.clean(1)
    assert engine.steps() == [20, 40]


def test_pins_that_cannot_be(tmp_path: Path) -> None:
    folder = make_saves(tmp_path, 10, 20)
    (folder / "\u00b2").mkdir()  # a digit, but no number
    for name, code in {"15": "no-checkpoint", "best": "no-checkpoint", "x": "bad-ref"}.items():
        with raises_code(code) as caught:
            find_step(folder, name, "piano/1")
        assert "10, 20" in str(caught.value)
    with raises_code("no-checkpoint"):
        set_pin(folder, 30, True, "piano/1")
    with raises_code("no-checkpoint"):
        find_step(tmp_path / "none", "last", "piano/1")
    (folder / "pinned").write_bytes(b"\xff\xfe")
    with raises_code("checkpoint-damaged"):
        set_pin(folder, 10, True, "piano/1")
    (folder / "pinned").write_text("15\n")  # of a save that somebody deleted
    assert set_pin(folder, find_step(folder, "15", "piano/1"), False, "piano/1")


def test_sizes_count_a_file_once(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    make_saves(one, 10, num_bytes=1000)
    for folder in (one, two):
        (folder / "metrics").mkdir(parents=True)
        (folder / "metrics/000.ndjson").write_bytes(b"x" * 30)
        (folder / "run.json").write_bytes(b"x" * 7)
    (one / "mirror").mkdir()
    (one / "events.ndjson").write_bytes(b"x" * 5)
    os.link(one / "checkpoints/00000010/model.safetensors", one / "mirror/again")
    os.link(one / "checkpoints/00000010/model.safetensors", two / "weights")
    os.symlink(one, two / "link")
    manifest = (one / "checkpoints/00000010/manifest.json").stat().st_size
    sizes = [usage(one, "1"), usage(two, "2")]
    assert sizes[0].total == bytes_below(one) == 1000 + manifest + 30 + 7 + 5
    assert sizes[0].by_kind["metrics"] == 35
    assert sizes[1].by_kind["other"] == 1000 + 7 + (two / "link").lstat().st_size
    assert sum_once(sizes) == sizes[0].total + sizes[1].total - 1000
    assert freed_bytes(one) == sizes[0].total - 1000, "the other name of the file stays"
    assert freed_bytes(tmp_path) == sum_once(sizes)
