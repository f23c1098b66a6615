"""If this fails, frames are paired with the poses, times or controls of other frames, or a source is read wrongly."""

import csv
import errno
import itertools
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rung.recipes.world.config import Dataset
from rung.recipes.world.controls import intents, lead_to_kept
from rung.recipes.world.memory import shrink
from rung.recipes.world.sources.episode import Episode, cut
from rung.recipes.world.sources.find import find_episodes
from rung.recipes.world.sources.frames import crop, fit, read_image
from tests.errors import raises_code
from tests.recipes.world.synthetic import film

REEL = film(12, seed=5, height=12, width=16)


def pictures(folder: Path, names: list[str]) -> list[str]:
    for name, frame in zip(names, REEL.frames):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(frame).save(folder / name)
    return names


def numbered(folder: Path, number: int = 12, place: str = "") -> list[str]:
    return pictures(folder, [f"{place}{i}.png" for i in range(number)])


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def table(folder: Path, **more: Any) -> list[dict[str, Any]]:
    """A row per frame; a callable makes a column."""
    columns = {"image": numbered(folder), "t": REEL.times.tolist()} | more
    return [
        {name: values(i) if callable(values) else values[i] for name, values in columns.items()}
        for i in range(len(REEL.times))
    ]


def csv_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def frames_of(episode: Episode) -> np.ndarray:
    return np.stack([frame for frame in episode.frames if frame is not None])


# Pictures with a table


def test_a_table_of_matrices(tmp_path: Path) -> None:
    jsonl(tmp_path / "frames.jsonl", table(tmp_path, pose=[pose.tolist() for pose in REEL.poses]))
    (episode,) = find_episodes(tmp_path, Dataset())
    np.testing.assert_array_equal(frames_of(episode), REEL.frames)
    np.testing.assert_array_equal(episode.times, REEL.times)
    assert episode.poses is not None
    np.testing.assert_allclose(episode.poses, REEL.poses, atol=1e-12)
    assert (episode.up, episode.controls) == ((0, -1, 0), None)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_every_kind_of_table_reads_the_same(tmp_path: Path, kind: str) -> None:
    rows = table(
        tmp_path, episode=lambda i: i // 6, map=lambda i: "AB"[i // 6], angle=lambda i: i / 8, fire=lambda i: i % 2,
        x=lambda i: 1.5 * i, y=lambda i: 0, z=lambda i: 0, yaw=lambda i: 10.0 * i, pitch=lambda i: 0, roll=lambda i: 0,
    )  # fmt: skip
    path = tmp_path / f"frames.{kind}"
    if kind == "jsonl":
        jsonl(path, rows)
    elif kind == "json":
        path.write_text(json.dumps({"frames": rows}))
    else:
        csv_table(path, rows)
    first, second = find_episodes(tmp_path, Dataset())
    assert [first.label, second.label] == ["A", "B"]
    assert first.control_names == ["angle", "fire"]
    assert second.controls is not None
    assert second.poses is not None
    np.testing.assert_array_equal(second.controls, [[i / 8, i % 2] for i in range(6, 12)])
    np.testing.assert_array_equal(second.poses[:, 0, 3], 1.5 * np.arange(6, 12))
    np.testing.assert_array_equal(np.concatenate([frames_of(first), frames_of(second)]), REEL.frames)
    np.testing.assert_array_equal(second.times, REEL.times[6:])
    assert first.up == (0, 0, 1)


@pytest.mark.parametrize(
    ("column", "factor"), [("timestamp_ms", 1e3), ("timestamp_s", 1), ("timestamp", 1e9), ("time_us", 1e6), ("time", 1)]
)
@pytest.mark.parametrize(("kind", "clock_s"), [("jsonl", 0), ("csv", 0), ("csv", 1706111310)])
def test_units_of_time(tmp_path: Path, column: str, factor: float, kind: str, clock_s: int) -> None:
    rows = table(tmp_path, angle=lambda i: i)
    for row in rows:
        seconds = clock_s + row.pop("t")
        row[column] = round(seconds * factor) if factor >= 1e3 and clock_s else seconds * factor  # all digits
    (jsonl if kind == "jsonl" else csv_table)(tmp_path / f"frames.{kind}", rows)
    (episode,) = find_episodes(tmp_path, Dataset())
    np.testing.assert_allclose(np.diff(episode.times), np.diff(REEL.times), atol=2e-3 if clock_s else 1e-6)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_dates_are_times(tmp_path: Path, kind: str) -> None:
    write = jsonl if kind == "jsonl" else csv_table
    write(tmp_path / f"frames.{kind}", table(tmp_path, angle=lambda i: i, t=lambda i: f"2024-05-01T12:00:00.{i:02d}0"))
    (episode,) = find_episodes(tmp_path, Dataset())
    np.testing.assert_allclose(np.diff(episode.times), 0.01, atol=1e-6)


def test_a_bare_count_takes_the_rate_of_the_table_or_says_what_it_assumed(tmp_path: Path) -> None:
    rows = table(tmp_path, angle=lambda i: i, t=lambda i: i)
    jsonl(tmp_path / "frames.jsonl", rows)
    (episode,) = find_episodes(tmp_path, Dataset())
    np.testing.assert_allclose(episode.times, np.arange(12) / 20)
    assert "20 frames a second are assumed" in " ".join(episode.notes)
    jsonl(tmp_path / "frames.jsonl", [row | {"rate_hz": 17.5} for row in rows])
    (episode,) = find_episodes(tmp_path, Dataset())
    np.testing.assert_allclose(episode.times, np.arange(12) / 17.5)
    assert episode.notes == []
    assert episode.control_names == ["angle"]


def test_lists_and_maps_of_controls(tmp_path: Path) -> None:
    rows = table(tmp_path, control=lambda i: [i, -i], ignored=lambda i: 3)
    jsonl(tmp_path / "frames.jsonl", rows)
    (episode,) = find_episodes(tmp_path, Dataset())
    assert episode.control_names == ["control_0", "control_1"]
    rows = table(tmp_path, control=lambda i: {"forward": i, "turn": None if i == 3 else -i})
    jsonl(tmp_path / "frames.jsonl", rows)
    (episode,) = find_episodes(tmp_path, Dataset())
    assert episode.control_names == ["forward", "turn"]
    assert episode.controls is not None
    assert np.isnan(episode.controls[3, 1])
    assert episode.controls[4].tolist() == [4, -4]


def test_rows_without_names_take_the_pictures_in_order(tmp_path: Path) -> None:
    rows = table(tmp_path, angle=lambda i: i)
    jsonl(tmp_path / "frames.jsonl", [{k: v for k, v in row.items() if k != "image"} for row in rows])
    (episode,) = find_episodes(tmp_path, Dataset())
    np.testing.assert_array_equal(frames_of(episode), REEL.frames)  # 10.png is not the second
    (tmp_path / "11.png").unlink()
    with raises_code("count-mismatch") as caught:
        find_episodes(tmp_path, Dataset())
    assert {"12", "11"} <= set(str(caught.value).split())


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_numbers_of_frames_are_no_names_of_pictures(tmp_path: Path, kind: str) -> None:
    numbered(tmp_path)
    rows = [{"frame": i, "steer": i / 8} for i in range(12)]
    (jsonl if kind == "jsonl" else csv_table)(tmp_path / f"frames.{kind}", rows)
    (episode,) = find_episodes(tmp_path, Dataset())
    np.testing.assert_array_equal(frames_of(episode), REEL.frames)
    np.testing.assert_allclose(episode.times, np.arange(12) / 20)
    assert episode.control_names == ["steer"]


def test_each_of_several_folders_is_a_place_of_its_own(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"run{number}").mkdir()
        rows = table(tmp_path / f"run{number}", angle=lambda i: i)
        jsonl(tmp_path / f"run{number}" / "log.jsonl", rows)
    assert [episode.label for episode in find_episodes(tmp_path, Dataset())] == [f"run{i}/log" for i in range(5)]
    jsonl(tmp_path / "run0" / "log.jsonl", [row | {"map": "E1M1"} for row in rows])
    jsonl(tmp_path / "run1" / "log.jsonl", [row | {"map": "E1M1"} for row in rows])
    jsonl(tmp_path / "run2" / "log.jsonl", [row | {"session": 7} for row in rows])
    labels = [episode.label for episode in find_episodes(tmp_path, Dataset())]
    assert labels == ["E1M1", "E1M1", "run2/session 7", "run3/log", "run4/log"]  # one map is one place


@pytest.mark.parametrize("name", ["iterdir", "is_file"])
def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Said by a patch rather than by chmod, as tests may be run by root, who may do everything."""
    (tmp_path / "a").mkdir()
    original = getattr(Path, name)

    def refuse(self: Path) -> Any:
        if "a" in self.relative_to(tmp_path).parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return original(self)

    monkeypatch.setattr(Path, name, refuse)
    with raises_code("cannot-read") as caught:
        find_episodes(tmp_path, Dataset())
    assert str(tmp_path / "a") in str(caught.value)


def test_folders_of_recordings(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        jsonl(tmp_path / name / "frames.jsonl", table(tmp_path / name, angle=lambda i: i))
    assert [episode.label for episode in find_episodes(tmp_path, Dataset())] == ["a", "b"]


def test_bad_tables_are_refused_with_what_and_where(tmp_path: Path) -> None:
    rows = table(tmp_path, angle=lambda i: i, pose=[pose.ravel().tolist() for pose in REEL.poses])

    def refused(changed: dict[int, dict[str, Any]], code: str, value: str) -> None:
        jsonl(tmp_path / "frames.jsonl", [row | changed.get(i, {}) for i, row in enumerate(rows)])
        with raises_code(code) as caught:
            find_episodes(tmp_path, Dataset())
        assert value in str(caught.value)

    refused({4: {"image": "gone.png"}}, "no-file", "gone.png")
    refused({4: {"image": None}}, "bad-table", "row 5")
    refused({4: {"t": None}}, "bad-table", "row 5")
    refused({4: {"t": "soon"}}, "bad-table", "row 5: t is 'soon'")
    refused({4: {"pose": [1, 2, 3]}}, "bad-table", "3, 16")
    refused({4: {"pose": [2.0] * 16}}, "bad-pose", "row 5")
    refused({i: {"pose": [1, 2]} for i in range(12)}, "bad-pose", "6, 7, 12 or 16")
    (tmp_path / "frames.jsonl").write_text('{"image": "0.png"}\n{oops\n')
    with raises_code("bad-table") as caught:
        find_episodes(tmp_path, Dataset())
    assert "line 2" in str(caught.value)
    (tmp_path / "frames.jsonl").write_text("\n")
    with raises_code("table-empty"):
        find_episodes(tmp_path, Dataset())


def test_what_is_not_a_source(tmp_path: Path) -> None:
    with raises_code("no-file"):
        find_episodes(tmp_path / "nowhere", Dataset())
    with raises_code("no-data"):
        find_episodes(tmp_path, Dataset())
    numbered(tmp_path)
    with raises_code("not-supported"):
        find_episodes(tmp_path / "0.png", Dataset())
    jsonl(tmp_path / "a.jsonl", [{"t": 0}])
    jsonl(tmp_path / "b.jsonl", [{"t": 0}])
    with raises_code("too-many"):
        find_episodes(tmp_path, Dataset())


# Donkey Car and KITTI


def record(i: int, name: str) -> dict[str, Any]:
    return {
        "_index": i, "_session_id": "24-01-24_0" if i < 8 else "24-01-24_1", "_timestamp_ms": 1706111307000 + 50 * i,
        "cam/image_array": name, "user/angle": i / 10, "user/throttle": 0.5, "user/mode": "user",
    }  # fmt: skip


def test_a_tub(tmp_path: Path) -> None:
    names = [name.removeprefix("images/") for name in numbered(tmp_path, place="images/")]
    records = [record(i, name) for i, name in enumerate(names)]
    jsonl(tmp_path / "catalog_0.catalog", records[:7])
    jsonl(tmp_path / "catalog_1.catalog", records[7:])
    lines: list[Any] = [["cam/image_array"], ["image_array"], {}, {"created_at": 1.0}]
    lines.append({"paths": ["catalog_0.catalog", "catalog_1.catalog"], "current_index": 12, "deleted_indexes": [2, 9]})
    (tmp_path / "manifest.json").write_text("\r\n".join(map(json.dumps, lines)) + "\r\n")
    first, second = find_episodes(tmp_path, Dataset())
    assert first.num_frames == 7
    assert second.num_frames == 3
    assert first.dropped == {"deleted by the driver": 2}
    np.testing.assert_array_equal(frames_of(first), REEL.frames[[0, 1, 3, 4, 5, 6, 7]])
    assert first.control_names == ["angle", "throttle"]
    assert second.controls is not None
    np.testing.assert_allclose(second.controls[:, 0], [0.8, 1.0, 1.1])
    np.testing.assert_allclose(np.diff(second.times), [0.1, 0.05], atol=1e-6)
    assert [episode.breaks.tolist() for episode in (first, second) if episode.breaks is not None] == [[2], [1]]


@pytest.mark.parametrize("deleted", [None, [], [2, 9], 3])
def test_what_was_deleted_from_a_tub(tmp_path: Path, deleted: Any) -> None:
    names = [name.removeprefix("images/") for name in numbered(tmp_path, place="images/")]
    jsonl(tmp_path / "catalog_0.catalog", [record(i, name) | {"_session_id": "0"} for i, name in enumerate(names)])
    (tmp_path / "manifest.json").write_text(json.dumps({"deleted_indexes": deleted}))
    if deleted == 3:
        with raises_code("bad-table") as caught:
            find_episodes(tmp_path, Dataset())
        assert "manifest.json" in str(caught.value)
        return
    (episode,) = find_episodes(tmp_path, Dataset())
    assert episode.num_frames == 12 - len(deleted or [])
    parts, _ = cut(episode.times, 1.0, episode.breaks)
    # no control leads over a hole, however short: a new stretch begins after each
    assert [(part.start, part.stop) for part in parts] == ([(0, 2), (2, 8), (8, 10)] if deleted else [(0, 12)])


def test_an_old_tub(tmp_path: Path) -> None:
    for i, name in enumerate(numbered(tmp_path)):
        row = {
            "cam/image_array": name,
            "user/angle": i,
            "user/throttle": 0,
            "user/mode": "user",
            "milliseconds": 50 * i,
        }
        (tmp_path / f"record_{i}.json").write_text(json.dumps(row))
    (episode,) = find_episodes(tmp_path, Dataset())
    np.testing.assert_array_equal(frames_of(episode), REEL.frames)
    assert episode.controls is not None
    np.testing.assert_array_equal(episode.controls[:, 0], np.arange(12))
    np.testing.assert_allclose(episode.times, 0.05 * np.arange(12))
    assert episode.breaks is not None
    assert episode.breaks.tolist() == []
    assert episode.control_names == ["angle", "throttle"]
    (tmp_path / "record_5.json").unlink()
    (episode,) = find_episodes(tmp_path, Dataset())
    assert episode.breaks is not None
    assert episode.breaks.tolist() == [5]


def test_kitti(tmp_path: Path) -> None:
    pictures(tmp_path, [f"image_2/{i:06d}.png" for i in range(12)])
    np.savetxt(tmp_path / "poses.txt", REEL.poses[:, :3].reshape(12, 12))
    np.savetxt(tmp_path / "times.txt", np.arange(12) * 0.1)
    (episode,) = find_episodes(tmp_path, Dataset())
    np.testing.assert_array_equal(frames_of(episode), REEL.frames)
    assert episode.poses is not None
    np.testing.assert_allclose(episode.poses, REEL.poses, atol=1e-12)
    np.savetxt(tmp_path / "times.txt", [*np.arange(4), np.nan, *np.arange(5, 12)])
    with raises_code("bad-table") as caught:
        find_episodes(tmp_path, Dataset())
    assert "times.txt, line 5" in str(caught.value)
    np.savetxt(tmp_path / "poses.txt", REEL.poses[:11, :3].reshape(11, 12))
    np.savetxt(tmp_path / "times.txt", np.arange(12) * 0.1)
    with raises_code("count-mismatch"):
        find_episodes(tmp_path, Dataset())


# Films

STAMPS = np.cumsum([0, 33, 33, 34, 33, 50, 17, 33, 33, 34, 33, 33])  # ms


def write_film(path: Path) -> None:
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=30)  # keeps every bit
        stream.width, stream.height, stream.pix_fmt = 16, 12, "bgr0"
        stream.codec_context.time_base, stream.codec_context.gop_size = Fraction(1, 1000), 1
        for stamp, pixels in zip(STAMPS, REEL.frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="bgr0")
            frame.pts, frame.time_base = int(stamp), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def test_a_film_with_poses_on_its_own_clock(tmp_path: Path) -> None:
    write_film(tmp_path / "way.mkv")
    times = STAMPS / 1e3
    moments = np.linspace(0, times[-1], 50)
    angles = [[2 * t, 0, 0, -40 * t, 0, 0] for t in moments]  # even speed: interpolation is exact
    jsonl(tmp_path / "way.jsonl", [{"t": t, "pose": pose} for t, pose in zip(moments, angles)])
    (episode,) = find_episodes(tmp_path / "way.mkv", Dataset())
    np.testing.assert_allclose(episode.times, times, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(frames_of(episode), REEL.frames)
    poses = episode.poses_at_frames(0.1)
    assert poses is not None
    np.testing.assert_allclose(poses[:, 0, 3], 2 * times, atol=1e-12)
    np.testing.assert_allclose(poses[:, 1, 2], np.sin(np.radians(-40 * times)), atol=1e-12)


def test_a_film_with_one_row_per_frame_or_numbered_rows(tmp_path: Path) -> None:
    write_film(tmp_path / "way.mkv")
    jsonl(tmp_path / "controls.jsonl", [{"angle": i} for i in range(12)])
    (episode,) = find_episodes(tmp_path, Dataset())
    assert episode.control_times is None
    assert episode.controls is not None
    jsonl(tmp_path / "controls.jsonl", [{"frame": i, "angle": i} for i in range(0, 12, 3)])
    (episode,) = find_episodes(tmp_path, Dataset())
    assert episode.control_times is not None
    np.testing.assert_allclose(episode.control_times, STAMPS[::3] / 1e3)
    jsonl(tmp_path / "controls.jsonl", [{"angle": i} for i in range(11)])
    with raises_code("count-mismatch"):
        find_episodes(tmp_path, Dataset())
    jsonl(tmp_path / "controls.jsonl", [{"frame": i, "angle": i} for i in range(40)])
    with raises_code("count-mismatch") as caught:
        find_episodes(tmp_path, Dataset())
    assert {"39,", "12"} <= set(str(caught.value).split())


def test_a_film_whose_sensors_have_another_clock(tmp_path: Path) -> None:
    write_film(tmp_path / "way.mkv")
    jsonl(tmp_path / "way.jsonl", [{"t": 1.7e9 + stamp / 1e3, "angle": i} for i, stamp in enumerate(STAMPS)])
    (episode,) = find_episodes(tmp_path, Dataset())
    controls = episode.controls_at_frames(0.01)
    assert controls is not None
    np.testing.assert_array_equal(controls[:, 0], np.arange(12))
    assert "begin at the same moment" in " ".join(episode.notes)


def test_whole_seconds_beside_a_film_are_seconds(tmp_path: Path) -> None:
    write_film(tmp_path / "way.mkv")
    jsonl(tmp_path / "way.jsonl", [{"t": i, "angle": i} for i in range(2)])
    (episode,) = find_episodes(tmp_path, Dataset())
    assert episode.control_times is not None
    np.testing.assert_array_equal(episode.control_times, [0, 1])
    assert "t is taken for whole seconds of the film" in " ".join(episode.notes)


def test_a_film_does_not_take_the_table_of_another(tmp_path: Path) -> None:
    write_film(tmp_path / "a.mkv")
    write_film(tmp_path / "b.mkv")
    jsonl(tmp_path / "a.jsonl", [{"angle": i} for i in range(12)])
    for source in (tmp_path, tmp_path / "b.mkv"):
        with raises_code("no-table") as caught:
            find_episodes(source, Dataset())
        assert "b.mkv" in str(caught.value)
    assert find_episodes(tmp_path / "a.mkv", Dataset())[0].label == "a"


def test_a_film_alone_is_refused(tmp_path: Path) -> None:
    write_film(tmp_path / "way.mkv")
    with raises_code("no-table"):
        find_episodes(tmp_path, Dataset())


def test_what_is_no_film_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("av")
    (tmp_path / "way.mp4").write_bytes(b"no film")
    jsonl(tmp_path / "way.jsonl", [{"t": 0.5, "angle": 1}])
    with raises_code("file-damaged"):
        find_episodes(tmp_path, Dataset())


def test_a_damaged_film_keeps_its_times(tmp_path: Path) -> None:
    write_film(tmp_path / "way.mkv")
    data = bytearray((tmp_path / "way.mkv").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 40] = bytes(40)
    (tmp_path / "way.mkv").write_bytes(bytes(data))
    jsonl(tmp_path / "way.jsonl", [{"t": stamp / 1e3, "angle": i} for i, stamp in enumerate(STAMPS)])
    (episode,) = find_episodes(tmp_path, Dataset())
    frames = list(episode.frames)
    assert len(frames) == episode.num_frames
    places = [int(np.argmin(np.abs(STAMPS / 1e3 - time))) for time in episode.times]
    whole = [frame is not None and np.array_equal(frame, REEL.frames[at]) for at, frame in zip(places, frames)]
    assert 8 <= sum(whole) < 12  # all but the damaged ones, each at its own time


# Time


@given(st.lists(st.floats(-1, 3), min_size=1, max_size=30))
def test_cutting_loses_nothing(steps: list[float]) -> None:
    times = np.cumsum(steps)
    parts, num_backwards = cut(times, 1.0)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(len(times)))
    for part in parts:
        inside = np.diff(times[part])
        assert ((inside >= 0) & (inside <= 1.0)).all()
    assert num_backwards == (np.diff(times) < 0).sum()


def test_no_pose_is_made_up_far_from_one() -> None:
    poses = REEL.poses[:3].copy()
    poses[1] = np.nan
    episode = Episode(
        "a", np.array([0, 0.05, 0.2, 0.5, 1.05, 1.2]), [], poses=poses, pose_times=np.array([0, 0.2, 1.0])
    )
    found = episode.poses_at_frames(0.1)
    assert found is not None
    assert np.isfinite(found).all((1, 2)).tolist() == [True, True, False, False, True, False]
    np.testing.assert_allclose(found[4], poses[2], atol=1e-12)  # after the last one it is held
    alone = Episode("a", np.array([0.0, 5.0]), [], poses=poses[:1], pose_times=np.array([0.05]))
    found = alone.poses_at_frames(0.1)
    assert found is not None
    np.testing.assert_allclose(found[0], poses[0], atol=1e-12)
    assert np.isnan(found[1]).all()


@given(st.integers(0, 3), st.sets(st.integers(0, 19), min_size=1), st.sets(st.integers(0, 19), max_size=2))
def test_controls_between_kept_frames_are_averaged(lag: int, chosen: set[int], unknown: set[int]) -> None:
    recorded = np.random.default_rng(lag).normal(size=(20, 2))
    recorded[sorted(unknown)] = np.nan
    kept = np.array(sorted(chosen))
    led = lead_to_kept(recorded, kept, lag)
    assert np.isnan(led[0]).all()
    for row, (before, frame) in enumerate(itertools.pairwise(kept), 1):
        causes = [i - lag for i in range(before + 1, frame + 1)]
        if any(i < 0 or i in unknown for i in causes):
            assert np.isnan(led[row]).all()
        else:
            np.testing.assert_allclose(led[row], np.mean([recorded[i] for i in causes], axis=0), atol=1e-12)


def test_channels_that_say_what_they_do() -> None:
    assert intents(["angle", "throttle"]) == {"forward": ["throttle", 1], "turn": ["angle", 1]}
    assert intents(["move_left", "turn_left", "look_down", "fire"]) == {
        "right": ["move_left", -1], "turn": ["turn_left", -1], "look": ["look_down", -1],
    }  # fmt: skip
    assert intents(["move_left_right_delta", "turn_left_right_delta"]) == {
        "right": ["move_left_right_delta", 1], "turn": ["turn_left_right_delta", 1],
    }  # fmt: skip
    assert intents(["control_0"]) == {}


# Pictures


@given(st.integers(8, 40), st.integers(8, 40), st.integers(1, 8), st.integers(1, 8), st.integers(0, 99))
def test_frames_are_means_of_areas(columns: int, rows: int, width: int, height: int, seed: int) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), dtype=np.uint8)
    top, left, tall, wide = crop(columns, rows, width, height)
    assert abs(wide * height - tall * width) <= max(width, height)  # the shape, to the pixel
    assert top == (rows - tall) // 2
    assert left == (columns - wide) // 2
    part = image[top : top + tall, left : left + wide].astype(np.int64)
    # every pixel as width x height small ones, of which each wanted pixel takes wide x tall
    fine = part.repeat(height, axis=0).repeat(width, axis=1)
    sums = fine.reshape(height, tall, width, wide, 3).sum((1, 3))
    np.testing.assert_array_equal(fit(image, width, height), (2 * sums + tall * wide) // (2 * tall * wide))


@pytest.mark.parametrize("name", ["grey.png", "grey.tif"])
def test_sixteen_bits_of_grey_keep_their_greys(tmp_path: Path, name: str) -> None:
    grey = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    Image.fromarray(grey).save(tmp_path / name)
    pixels = read_image(tmp_path / name)
    assert pixels is not None
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, np.rint(grey / 257)[..., None].repeat(3, 2))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_whose_white_is_not_known_are_refused(tmp_path: Path, dtype: type) -> None:
    Image.fromarray(np.ones((12, 16), dtype)).save(tmp_path / "deep.tif")
    with raises_code("not-supported"):
        read_image(tmp_path / "deep.tif")


def test_fitting_agrees_with_others() -> None:
    import torch

    frame = film(1, seed=0, height=96, width=128).frames[0]
    np.testing.assert_array_equal(fit(frame, 64, 48), shrink(torch.from_numpy(frame), 2).numpy())
    np.testing.assert_array_equal(fit(frame, 128, 96), frame)
    theirs = np.asarray(Image.fromarray(frame).reduce(4)).astype(int)
    assert np.abs(fit(frame, 32, 24).astype(int) - theirs).max() <= 1


def test_frames_are_not_enlarged() -> None:
    for height, size in ((120, (160, 120)), (160, (212, 159))):
        with raises_code("too-large") as caught:
            fit(np.zeros((height, size[0], 3), np.uint8), 256, 192)
        assert "dataset.width={} dataset.height={}".format(*size) in str(caught.value)
