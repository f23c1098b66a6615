"""If this fails, frames, poses and controls of the embedded walk do not belong together, or it cannot be repeated."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.data.store import Store
from rung.errors import DataError
from rung.recipes.world.config import Dataset
from rung.recipes.world.data import prepare
from rung.recipes.world.geometry import move_between
from rung.recipes.world.sources.episode import Episode
from rung.recipes.world.walk import episodes as walk
from rung.recipes.world.walk.walker import FAR, GLIDE, Plan, Walker, nearest, read_plan
from tests.errors import raises_code

RIGHT, FORWARD, LOOK_UP, TURN_RIGHT = 0, 2, 3, 4


def ignore(what: str, done: int, total: int) -> None:
    pass


def episodes(*maps: str, num_frames: int = 100, seed: int = 0, width: int = 128, height: int = 96) -> Iterator[Episode]:
    cfg = Dataset(maps=list(maps), num_frames=num_frames, width=width, height=height)
    return walk.walk_episodes(cfg, seed, ignore)


@pytest.fixture(scope="session")
def vizdoom() -> None:
    try:
        walk.find_package(ignore)
    except DataError as error:
        pytest.skip(f"needs vizdoom: {error}")


@pytest.fixture(scope="session")
def walked(vizdoom: None) -> Episode:
    (episode,) = episodes("map01", num_frames=400, seed=3, width=256, height=192)
    return episode


def moves(episode: Episode) -> np.ndarray:
    assert episode.poses is not None
    return move_between(episode.poses[:-1], episode.poses[1:])


# What is recorded


def test_what_an_episode_holds(walked: Episode) -> None:
    assert walked.label == "map01"
    assert walked.num_frames == len(walked.frames) == 400
    assert {(np.shape(frame), frame.dtype) for frame in walked.frames} == {((192, 256, 3), np.dtype(np.uint8))}
    np.testing.assert_allclose(np.diff(walked.times), 2 / 35)
    assert walked.control_names == ["forward", "strafe", "yaw", "pitch"]
    assert walked.controls is not None
    assert walked.poses is not None
    assert walked.controls.shape == (400, 4)
    turn = walked.poses[:, :3, :3]
    np.testing.assert_allclose(turn @ turn.swapaxes(1, 2), np.broadcast_to(np.eye(3), turn.shape), atol=1e-12)
    up = turn.swapaxes(1, 2) @ np.array(walked.up)
    assert (up[:, 1] < -0.95).all()  # the camera's y is down, and it is never far from level
    np.testing.assert_allclose(up[:, 0], 0, atol=1e-12)  # ViZDoom does not lean


def test_a_control_moves_the_next_pose(walked: Episode) -> None:
    control, move = walked.controls, moves(walked)
    assert control is not None

    def agreement(name: int, channel: int, lag: int) -> float:
        led = control[1 - lag : len(control) - lag, name]
        return float(np.corrcoef(led[1:], move[1:, channel])[0, 1])

    assert agreement(2, TURN_RIGHT, 1) > 0.999
    assert agreement(3, LOOK_UP, 1) > 0.999
    assert agreement(0, FORWARD, 1) > 0.6  # the body is heavy, and there are walls
    assert agreement(1, RIGHT, 1) > 0.6
    for name, channel in ((2, TURN_RIGHT), (3, LOOK_UP)):
        assert agreement(name, channel, 0) < agreement(name, channel, 1)


def test_frames_show_what_poses_say(walked: Episode) -> None:
    assert walked.poses is not None
    apart, focal = 3, 128.0  # frames, so that a look is some pixels; 90 degrees in 256 pixels
    move = move_between(walked.poses[:-apart], walked.poses[apart:])
    middle = np.stack([np.asarray(frame, np.float64)[64:128, 64:192].mean(-1) for frame in walked.frames])
    seen = np.array([shift(a, b) for a, b in zip(middle[:-apart], middle[apart:])])
    turns, looks = (np.abs(np.degrees(move[:, channel])) > 1.5 for channel in (TURN_RIGHT, LOOK_UP))
    assert min(turns.sum(), looks.sum()) > 50
    # Turning right, what is seen goes left; looking up, it goes down. Walking is in the way, hence the medians.
    assert 0.8 < np.median(-seen[turns, 1] / (focal * move[turns, TURN_RIGHT])) < 1.25
    assert 0.95 < np.median(seen[looks, 0] / (focal * move[looks, LOOK_UP])) < 1.45  # Doom draws 1.2 times too tall


def shift(before: np.ndarray, after: np.ndarray) -> tuple[int, int]:
    """By how many rows down and columns to the right the picture has gone: the peak of the phase correlation."""
    window = np.outer(np.hanning(before.shape[0]), np.hanning(before.shape[1]))
    a, b = (np.fft.fft2((x - x.mean()) * window) for x in (before, after))
    product = b * a.conj()
    peak = np.fft.ifft2(product / (np.abs(product) + 1e-3)).real
    row, column = np.unravel_index(peak.argmax(), peak.shape)
    height, width = before.shape
    return (int(row) + height // 2) % height - height // 2, (int(column) + width // 2) % width - width // 2


def test_all_directions_are_there(vizdoom: None) -> None:
    move = np.concatenate([moves(e) for e in episodes("E1M5", "E3M1", "map23", num_frames=1800, seed=1)])
    right, forward = move[:, RIGHT], move[:, FORWARD]
    has_moved, is_along = np.hypot(right, forward) > 1, np.abs(forward) > np.abs(right)
    shares = [
        (has_moved & is_along & (forward > 0)).mean(), (has_moved & is_along & (forward < 0)).mean(),
        (has_moved & ~is_along & (right > 0)).mean(), (has_moved & ~is_along & (right < 0)).mean(),
    ]  # fmt: skip
    turn, look = np.degrees(move[:, TURN_RIGHT]), np.degrees(move[:, LOOK_UP])
    assert 0.7 < has_moved.mean() < 0.97  # and sometimes stands still
    assert min(shares) > 0.1
    assert min((turn > 0.3).mean(), (turn < -0.3).mean()) > 0.25
    assert min((look > 0.1).mean(), (look < -0.1).mean()) > 0.25
    assert (np.abs(turn) < 4).mean() > 0.9


def test_the_same_seed_gives_the_same_bytes(vizdoom: None) -> None:
    """Also when other maps are walked in at the same time."""
    (alone,) = episodes("E1M1", num_frames=100, seed=7)
    beside, other = episodes("E1M1", "map01", num_frames=200, seed=7)
    (another,) = episodes("E1M1", num_frames=100, seed=8)
    assert [e.label for e in (beside, other)] == ["E1M1", "map01"]
    for name in ("times", "frames", "poses", "controls"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(beside, name))
    assert not np.array_equal(alone.frames, another.frames)  # type: ignore[arg-type]


def test_a_place_is_walked_again_and_again_and_another_map_lies_beside_it(vizdoom: None, tmp_path: Path) -> None:
    cfg = Dataset(num_frames=2400, width=32, height=24)
    prepare(None, tmp_path / "world", cfg, 5, False, ignore)
    store = Store.open(tmp_path / "world")
    place, unseen = walk.PLACE[0], walk.UNSEEN[0]
    of_split = {split: {store.index[n]["label"] for n in store.split(split)} for split in store.splits}
    assert of_split["unseen"] == {unseen}
    assert of_split["train"] | of_split["validation"] == {f"{place} walk {n}" for n in range(1, 5)}
    assert len(of_split["validation"]) == 1  # a whole walk
    lengths = {split: int(store.lengths[store.split(split)].sum()) for split in store.splits}
    assert lengths == {"train": 1650, "validation": 550, "unseen": 200}
    # All begin at the same spot, and go their own ways from there.
    where = store.arrays["poses"][:, :2, 3]
    begins = [where[start] for start, record in zip(store.starts, store.index) if record["split"] != "unseen"]
    assert np.ptp(begins, axis=0).max() < 64
    walks = [where[store.starts[n] : store.starts[n] + 200] for n in range(4)]
    assert len({one.tobytes() for one in walks}) == 4


def test_maps_of_ones_own_have_no_other_beside_them(vizdoom: None) -> None:
    assert [e.split for e in episodes("E1M1", "map01", num_frames=100, width=32, height=24)] == [None, None]
    cfg = Dataset(maps=["E1M1"], unseen_maps=["map01"], num_frames=120, width=32, height=24)
    found = [(e.label, e.num_frames, e.split) for e in walk.walk_episodes(cfg, 0, ignore)]
    assert found == [("E1M1", 110, None), ("map01", 10, "unseen")]


def test_sizes_and_shares(vizdoom: None) -> None:
    small = list(episodes("map02", "E2M1", "map01", num_frames=101, width=64, height=48))
    assert [(e.label, e.num_frames) for e in small] == [("map02", 34), ("E2M1", 34), ("map01", 33)]
    (large,) = episodes("map02", num_frames=100, width=256, height=192)
    blocks = np.asarray(large.frames)[:34].reshape(34, 48, 4, 64, 4, 3).mean((2, 4))
    np.testing.assert_array_equal(small[0].frames, np.floor(blocks + 0.5))  # type: ignore[arg-type]


# What is left behind


def test_nothing_stays(vizdoom: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, scratch = tmp_path / "here", tmp_path / "scratch"
    here.mkdir()
    scratch.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    walk_on = episodes("map01", "map02", "map03", num_frames=300)
    first = next(walk_on)
    walk_on.close()  # type: ignore[attr-defined]  # a user has pressed Ctrl-C
    assert list(here.iterdir()) == list(scratch.iterdir()) == []
    assert np.asarray(first.frames).any()  # still to be read by whoever holds it


def test_a_recorder_that_breaks_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "vizdoom"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('the engine is out of oil')\n")
    monkeypatch.setattr(walk, "find_package", lambda report: tmp_path)
    with raises_code("walk-failed") as caught:
        list(episodes("map01", "map02"))
    assert "OSError: the engine is out of oil" in str(caught.value)
    assert "\n" not in str(caught.value)


# What is refused


def test_unknown_maps() -> None:
    with raises_code("no-map"):
        next(episodes("E5M1"))
    with raises_code("bad-value"):
        next(episodes("map01", "MAP01"))
    with raises_code("no-map"):
        walk.check_maps([], ["map33"])
    with raises_code("bad-value"):
        walk.check_maps(["map01"], ["Map01"])
    with raises_code("bad-value"):
        walk.check_maps([], walk.PLACE)
    with raises_code("bad-value"):
        walk.check_maps([], [f"map{number:02d}" for number in range(1, 8)])
    assert walk.check_maps(["e1m1", "MAP07"], []) == (["E1M1", "map07"], [])
    assert walk.check_maps(["E1M1"], ["MAP07"]) == (["E1M1"], ["map07"])
    place, unseen = walk.check_maps([], [])
    assert len(set(place + unseen)) == len(place) + len(unseen) == 2


def test_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(walk.platform, "machine", lambda: "riscv64")
    with raises_code("not-installed") as caught:
        next(episodes("map01"))
    assert "`pip install vizdoom==1.3.2`" in str(caught.value)


@given(st.integers(8, 1400), st.integers(8, 1050))
def test_the_drawn_size_covers_the_wanted_one(width: int, height: int) -> None:
    w, h, factor = walk.drawn_size(width, height)
    assert (w, h) in walk.SIZES
    assert (w, h) == (width * factor, height * factor) if factor > 1 else (w >= width and h >= height)


def test_drawn_sizes_that_are_known() -> None:
    assert walk.drawn_size(128, 96) == (256, 192, 2)
    assert walk.drawn_size(256, 192) == (256, 192, 1)
    assert walk.drawn_size(160, 90) == (320, 180, 2)
    with raises_code("too-large"):
        walk.drawn_size(4000, 3000)


# The plan and the walker, without an engine


ROOM = np.array([[0, 0, 512, 0], [512, 0, 512, 512], [512, 512, 0, 512], [0, 512, 0, 0]], np.float64)


@given(st.floats(1, 511), st.floats(1, 511), st.floats(-np.pi, np.pi))
def test_how_far_one_sees_in_a_square_room(x: float, y: float, angle: float) -> None:
    free = Plan(ROOM, ROOM[:0], ROOM[:0]).free(x, y, np.array([angle]))[0]
    hit = np.array([x + free * np.cos(angle), y + free * np.sin(angle)])
    assert np.abs(hit - 256).max() == pytest.approx(256, abs=1e-6)


def test_an_empty_plan() -> None:
    nothing = Plan(ROOM[:0], ROOM[:0], ROOM[:0])
    assert nothing.free(0, 0, np.zeros(2)).tolist() == [FAR, FAR]
    assert nearest(nothing.doors, 0, 0) == (-1, FAR)
    assert nearest(ROOM, 500, 256) == (1, 12)


@pytest.mark.parametrize("seed", range(3))
def test_a_walker_fills_a_room(seed: int) -> None:
    """A body without weight in a square room: it gets everywhere, in every direction, and seldom stands at a wall."""
    walker, pose = Walker(seed, Plan(ROOM, ROOM[:0], ROOM[:0])), np.array([100.0, 100, 41, 0, 0, 0])
    trace, controls = np.zeros((1500, 2)), np.zeros((1500, 4))
    for step in range(1500):
        controls[step], _ = walker.step(pose)
        ahead, right, turn, look = controls[step]
        c, s = np.cos(np.radians(pose[3])), np.sin(np.radians(pose[3]))
        pose[:2] = np.clip(pose[:2] + GLIDE * np.array([ahead * c + right * s, ahead * s - right * c]), 16, 496)
        pose[3:5] += -2 * turn, -2 * look
        trace[step] = pose[:2]
    assert 0.7 < (np.hypot(*np.diff(trace, axis=0).T) > 1).mean() < 0.99  # the rest is rest
    assert len(set(map(tuple, (trace // 64).astype(int)))) > 50  # of 64 squares
    assert np.abs(controls[:, :2].mean(0)).max() < 4
    assert np.abs(controls[:, 2]).max() < 4


def test_a_plan_out_of_a_wad(tmp_path: Path) -> None:
    """Two rooms of 64 x 64 with one line between: a door, a step of 32, a step of 16, an exit."""
    for special, floor, is_wall, is_door, is_exit in (
        (1, 0, False, True, False), (0, 32, True, False, False),
        (0, 16, False, False, False), (52, 0, True, False, True),
    ):  # fmt: skip
        wad = tmp_path / "toy.wad"
        wad.write_bytes(toy_wad("MAP07", special, floor))
        plan = read_plan(wad, "map07")
        between = [64.0, 0.0, 64.0, 64.0]
        assert len(plan.walls) == 6 + is_wall
        assert (between in plan.walls.tolist()) == is_wall
        assert (plan.doors.tolist() == [between]) == is_door
        assert (plan.exits.tolist() == [between]) == is_exit
    with raises_code("no-map"):
        read_plan(wad, "map01")


def toy_wad(name: str, special: int, floor: int) -> bytes:
    corners = [(0, 0), (64, 0), (128, 0), (128, 64), (64, 64), (0, 64)]
    lines = b"".join(struct.pack("<7H", a, (a + 1) % 6, 1, 0, 0, 0, 0xFFFF) for a in range(6))
    lines += struct.pack("<7H", 1, 4, 4, special, 0, 0, 1)
    lumps = {
        name: b"",
        "LINEDEFS": lines,
        "SIDEDEFS": b"".join(bytes(28) + struct.pack("<H", sector) for sector in (0, 1)),
        "VERTEXES": b"".join(struct.pack("<hh", *corner) for corner in corners),
        "SECTORS": b"".join(struct.pack("<hh", height, 128) + bytes(22) for height in (0, floor)),
    }
    body, directory = b"", b""
    for lump, data in lumps.items():
        directory += struct.pack("<ii8s", 12 + len(body), len(data), lump.encode())
        body += data
    return struct.pack("<4sii", b"IWAD", len(lumps), 12 + len(body)) + body + directory
