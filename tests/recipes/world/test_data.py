"""If this fails, a prepared world leaks between its splits, loses frames silently or tells of moves that were not."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rung.data.store import Store
from rung.errors import DataError
from rung.recipes.world import data, geometry, split
from rung.recipes.world.config import Dataset
from rung.recipes.world.memory import shrink
from rung.recipes.world.sources.episode import Episode
from tests.conftest import shared_data
from tests.errors import raises_code
from tests.recipes.world.synthetic import Film, film

SIZE: dict[str, Any] = {"width": 16, "height": 12}


def quiet(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def record(folder: Path, films: list[Film], poses: bool = True, **columns: Any) -> Path:
    """A folder of pictures with a table; a callable(episode, frame) makes a column."""
    folder.mkdir(exist_ok=True)
    lines = []
    for number, reel in enumerate(films):
        for t, frame in enumerate(reel.frames):
            name = f"{number}_{t}.png"
            Image.fromarray(frame).save(folder / name, compress_level=1)
            row = {"episode": number, "image": name, "timestamp_s": reel.times[t]}
            if poses:
                row["pose"] = reel.poses[t].ravel().tolist()
            lines.append(json.dumps(row | {key: make(number, t) for key, make in columns.items()}))
    (folder / "frames.jsonl").write_text("\n".join(lines))
    return folder


def make(source: Path, out: Path, seed: int = 0, **keys: Any) -> Store:
    summary = data.prepare(source, out, Dataset(**SIZE | keys), seed, False, quiet)
    store = Store.open(out, kind="world")
    assert store.verify() == []
    assert store.info["summary"] == summary
    return store


@pytest.fixture(scope="module")
def films() -> list[Film]:
    return [film(40 + 10 * i, seed=i, height=24, width=32) for i in range(5)]


@pytest.fixture(scope="module")
def folder(films: list[Film], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("world") / "walks", films)


def test_the_store_holds_what_was_recorded(folder: Path, films: list[Film], tmp_path: Path) -> None:
    store = make(folder, tmp_path / "w", width=32, height=24, test=0.1)
    assert store.info["divisors"] == [1, 2, 4, 8]
    assert store.info["controls"] == list(geometry.CHANNELS)
    assert store.info["dropped"] == {}
    assert store.manifest["indexed"] == "frames"
    assert sorted(r["episode"] for r in store.index) == [0, 1, 2, 3, 4]  # whole episodes
    assert {name: len(store.split(name)) for name in store.splits} == {"train": 3, "validation": 1, "test": 1}
    for item in store.index:
        reel, rows = films[item["episode"]], slice(item["start"], item["start"] + item["length"])
        np.testing.assert_array_equal(store.arrays["frames"][rows], reel.frames)
        np.testing.assert_array_equal(store.arrays["times"][rows], reel.times)
        np.testing.assert_allclose(store.arrays["poses"][rows], reel.poses, atol=1e-12)
        given = store.arrays["controls"][rows].astype(np.float64)
        assert (given[0] == 0).all()
        assert (given[1:, -1] == 1).all()
        np.testing.assert_allclose(given[1:, 2], reel.moves[1:, 0], atol=1e-5)
        np.testing.assert_allclose(given[1:, 7], np.cumsum(reel.moves[:, 2])[1:], atol=1e-6)
        np.testing.assert_allclose(given[1:, 8], np.diff(reel.times), atol=1e-8)
        again = geometry.apply_move(reel.poses[:-1], given[1:, :6])
        np.testing.assert_allclose(again, reel.poses[1:], atol=1e-4)  # as float32 has it
    full = torch.from_numpy(np.array(store.arrays["frames"]))
    for divisor in (2, 4, 8):
        np.testing.assert_array_equal(store.arrays[f"frames_{divisor}"], shrink(full, divisor).numpy())


def rows_of(store: Store, name: str) -> list[slice]:
    return [slice(store.starts[i], store.starts[i] + store.lengths[i]) for i in store.split(name)]


def test_figures_are_those_of_the_training_frames(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rung.recipes.world.data.CHUNK", 7)  # chunks must not show
    store = make(folder, tmp_path / "w")
    train = [store.arrays["frames"][rows].astype(np.float64) for rows in rows_of(store, "train")]
    mean = np.floor(np.concatenate(train).mean(0) + 0.5)
    np.testing.assert_array_equal(store.arrays["mean_frame"], mean[None])
    for name in ("train", "validation"):
        stretches = [store.arrays["frames"][rows].astype(np.float64) / 127.5 - 1 for rows in rows_of(store, name)]
        copied = np.concatenate([np.abs(np.diff(x, axis=0)) for x in stretches]).mean()
        meant = np.concatenate([np.abs(x[1:] - (mean / 127.5 - 1)) for x in stretches]).mean()
        assert store.info["baselines"][name] == pytest.approx({"persistence": copied, "mean_frame": meant})
    given = np.concatenate([store.arrays["controls"][rows][1:] for rows in rows_of(store, "train")]).astype(np.float64)
    figures = store.info["statistics"]
    assert figures["constant"] == ["right", "down", "roll", "valid"]
    np.testing.assert_allclose(figures["mean"], given.mean(0), atol=1e-9)
    for channel, name in enumerate(geometry.CHANNELS):
        expected = 1 if name in figures["constant"] else given[:, channel].std()
        assert figures["std"][channel] == pytest.approx(expected)
    assert figures["brisk"][2] == pytest.approx(np.sort(np.abs(given[:, 2]))[int(0.9 * len(given))], rel=0.1)
    assert (np.array(figures["low"]) <= figures["mean"]).all()
    assert (np.array(figures["high"]) >= figures["mean"]).all()


def test_same_seed_same_store_and_another_seed_another_split(folder: Path, tmp_path: Path) -> None:
    first, again = make(folder, tmp_path / "a"), make(folder, tmp_path / "b")
    assert first.fingerprint == again.fingerprint
    chosen = {tuple(make(folder, tmp_path / str(s), s, validation=0.3).split("validation").tolist()) for s in range(4)}
    assert len(chosen) > 1


def test_settings_are_kept(folder: Path, tmp_path: Path) -> None:
    store = make(folder, tmp_path / "w", validation=0.3, seed=4)
    assert store.info["settings"] == asdict(Dataset(**SIZE, validation=0.3)) | {"seed": 4}
    assert store.info["source"] == "walks"


# Splits


def names(times: list[np.ndarray]) -> list[str]:
    """A label of its own for each episode."""
    return list(map(str, range(len(times))))


def test_episodes_of_one_place_stay_on_one_side() -> None:
    times = [np.arange(50) / 20] * 40
    places = [f"map{number % 10}" for number in range(40)]
    for seed in range(20):
        labels, way = split.assign(times, places, Dataset(validation=0.2, test=0.2), seed)
        assert way == "episode"
        sides = {(place, int(split)) for place, numbers in zip(places, labels) for split in numbers}
        assert len(sides) == 10
        assert {side for _, side in sides} == {0, 1, 2}


@given(
    st.lists(st.integers(2, 900), min_size=1, max_size=6), st.floats(0, 0.4), st.floats(0, 0.4), st.floats(0, 3),
    st.integers(0, 9),
)  # fmt: skip
def test_blocks_of_time_keep_their_distance(
    lengths: list[int], validation: float, test: float, gap_s: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    times = [np.cumsum(rng.uniform(0.02, 0.1, length)) for length in lengths]
    cfg = Dataset(split="time", validation=validation, test=test, split_gap=gap_s)
    labels, way = split.assign(times, names(times), cfg, seed)
    assert way == "time"
    for t, numbers in zip(times, labels):
        assert len(numbers) == len(t)
        for one, other in ((0, 1), (0, 2), (1, 2)):
            a, b = t[numbers == one], t[numbers == other]
            if len(a) and len(b):
                assert np.abs(a[:, None] - b).min() >= gap_s
    share = np.mean(np.concatenate(labels) == 1)
    assert share <= validation + (1 + sum(lengths) / 96) / sum(lengths)  # half a frame a block, of 96 or more


@given(st.lists(st.tuples(st.integers(2, 300), st.booleans()), min_size=2, max_size=6), st.integers(0, 9))
def test_parts_of_one_recording_keep_their_distance_too(parts: list[tuple[int, bool]], seed: int) -> None:
    """Between parts the recorder paused for 1.2 s, or its clock went back to 0; the true time continues."""
    true = np.arange(sum(length for length, _ in parts)) * 0.05
    stamps, starts = true.copy(), np.cumsum([0, *(length for length, _ in parts)])[:-1]
    for start, (_, is_back) in zip(starts[1:], parts[1:]):
        true[start:] += 0 if is_back else 1.15
        stamps[start:] += -stamps[start] if is_back else 1.15
    cfg = Dataset(split="time", validation=0.2, test=0.2, split_gap=2.0)
    times = np.split(stamps, starts[1:])
    labels, _ = split.assign(times, ["a"] * len(parts), cfg, seed, [0] * len(parts))
    numbers = np.concatenate(labels)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        a, b = true[numbers == one], true[numbers == other]
        if len(a) and len(b):
            assert np.abs(a[:, None] - b).min() >= 2.0 - 1e-9


def test_blocks_are_spread_over_a_long_recording() -> None:
    times = [np.arange(20_000) / 20]
    labels, _ = split.assign(times, names(times), Dataset(validation=0.1, test=0.05), 3)
    for number, share in ((1, 0.1), (2, 0.05)):
        places = np.flatnonzero(labels[0] == number)
        assert abs(len(places) / 20_000 - share) < 0.01
        assert all(((places >= start) & (places < start + 5000)).any() for start in range(0, 20_000, 5000))


@given(
    st.lists(st.integers(2, 900), min_size=3, max_size=20),
    st.floats(0.01, 0.4),
    st.floats(0.01, 0.4),
    st.integers(0, 9),
)
def test_whole_episodes_are_held_out(lengths: list[int], validation: float, test: float, seed: int) -> None:
    times = [np.arange(length) / 20 for length in lengths]
    cfg = Dataset(split="episode", validation=validation, test=test)
    labels, way = split.assign(times, names(times), cfg, seed)
    assert way == "episode"
    assert all(len(set(numbers.tolist())) == 1 for numbers in labels)
    chosen = [int(numbers[0]) for numbers in labels]
    assert set(chosen) == {0, 1, 2}


def test_shares_of_episodes() -> None:
    labels, _ = split.assign(
        [np.arange(100) / 20] * 50, list(map(str, range(50))), Dataset(validation=0.1, test=0.2), 0
    )
    chosen = [int(numbers[0]) for numbers in labels]
    assert (chosen.count(1), chosen.count(2)) == (5, 10)


def test_a_split_by_time_in_the_store(films: list[Film], tmp_path: Path) -> None:
    source = record(tmp_path / "s", films[3:])
    store = make(source, tmp_path / "w", split_gap=0.2)  # two episodes: blocks of time
    assert store.info["split_by"] == "time"
    in_records = sum(item["length"] for item in store.index)
    assert in_records + store.info["dropped"]["split_gap"] == 70 + 80
    assert set(store.splits) == {"train", "validation"}
    for item in store.index:  # a record begins with an unknown control, also in the middle of an episode
        given = store.arrays["controls"][item["start"] : item["start"] + item["length"]]
        assert given[0, -1] == 0
        assert (given[1:, -1] == 1).all()


def test_a_pause_is_no_leak_between_splits(films: list[Film], tmp_path: Path) -> None:
    reel = films[4]
    for seed in range(5):  # eight parts of one recording, 1.2 s apart
        reel = reel._replace(times=np.arange(80) * 0.05 + 1.15 * (np.arange(80) // 10))
        source = record(tmp_path / f"s{seed}", [reel])
        store = make(source, tmp_path / f"w{seed}", seed, split="time", validation=0.3)
        assert {item["source"] for item in store.index} == {0}
        assert len({item["episode"] for item in store.index}) > 1
        held, trained = (np.concatenate([store.arrays["times"][r] for r in rows_of(store, n)]) for n in store.splits)
        assert np.abs(held[:, None] - trained).min() >= 2.0


def test_a_share_that_could_not_be_held_out_is_noted(films: list[Film], tmp_path: Path) -> None:
    reel = films[4]._replace(times=np.arange(80) * 0.05 + 10 * (np.arange(80) // 4))  # 20 episodes of 4 frames
    store = make(record(tmp_path / "s", [reel]), tmp_path / "w", split="time", validation=0.4)
    assert "validation has 5.0% of the frames, dataset.validation=0.4 asked for 40.0%" in store.info["summary"]
    assert "asked for" not in make(record(tmp_path / "t", films[3:]), tmp_path / "v", split_gap=0.2).info["summary"]


def test_splits_that_cannot_be(films: list[Film], tmp_path: Path) -> None:
    source = record(tmp_path / "s", films[:2])
    with raises_code("bad-value"):
        make(source, tmp_path / "w", validation=0.5, test=0.5)
    with raises_code("too-few"):
        make(source, tmp_path / "w", split="episode", test=0.1)
    alone = record(tmp_path / "t", films[:1])
    with raises_code("split-empty") as caught:
        make(alone, tmp_path / "w", split="time", split_gap=60.0, validation=0.6)
    assert "dataset.split_gap=60" in str(caught.value)
    assert not (tmp_path / "w").exists()
    assert make(source, tmp_path / "w", validation=0.0).splits == ["train"]


# What a recording may be like


def test_pauses_and_clocks_that_run_backwards_end_an_episode(films: list[Film], tmp_path: Path) -> None:
    reel = films[4]
    times = reel.times.copy()
    times[20:] += 5
    times[50:] -= 30
    store = make(record(tmp_path / "s", [reel._replace(times=times)]), tmp_path / "w", validation=0.0)
    assert [(item["start"], item["length"]) for item in store.index] == [(0, 20), (20, 30), (50, 30)]
    assert (store.arrays["controls"][[0, 20, 50], -1] == 0).all()
    assert "time jumps backwards 1 times" in store.info["summary"]


def test_a_recording_of_uneven_steps_is_as_long_as_it_was(films: list[Film], tmp_path: Path) -> None:
    times = np.concatenate([np.arange(41) * 0.05, 2 + np.arange(1, 40) * 0.95])
    store = make(record(tmp_path / "s", [films[4]._replace(times=times)]), tmp_path / "w", validation=0.0)
    assert "0.7 min at 20 Hz (median)" in store.info["summary"]  # 39 s


def test_every_second_frame(films: list[Film], tmp_path: Path) -> None:
    source = record(tmp_path / "s", films[:1], forward=lambda e, t: t)
    store = make(source, tmp_path / "w", every=2, validation=0.0, width=32, height=24)
    np.testing.assert_array_equal(store.arrays["frames"], films[0].frames[::2])
    assert store.info["dropped"] == {"every": 20}
    moves = geometry.move_between(films[0].poses[:-2:2], films[0].poses[2::2])
    np.testing.assert_allclose(store.arrays["controls"][1:, :6], moves, atol=1e-5)
    store = make(source, tmp_path / "r", every=2, validation=0.0, controls="recorded", episode_gap=0.08)
    assert len(store.index) == 1  # 0.1 s between kept frames is no pause
    np.testing.assert_allclose(store.arrays["controls"][1:, 0], np.arange(0, 38, 2) + 0.5)  # the mean of 0 and 1, ...


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_recorded_controls_lead_to_their_frame(films: list[Film], tmp_path: Path, lag: int) -> None:
    source = record(tmp_path / "s", films[:1], False, angle=lambda e, t: t / 100, throttle=lambda e, t: 0.5)
    store = make(source, tmp_path / "w", validation=0.0, control_lag=lag)
    assert store.info["controls"] == ["angle", "throttle", "dt", "valid"]
    assert store.info["control_kind"] == "recorded"
    assert store.info["intents"] == {"forward": ["throttle", 1], "turn": ["angle", 1]}
    assert store.info["statistics"]["constant"] == ["throttle", "valid"]
    given, first = store.arrays["controls"], max(1, lag)
    assert (given[:first] == 0).all()
    np.testing.assert_allclose(given[first:, 0], (np.arange(first, 40) - lag) / 100, rtol=1e-6)
    np.testing.assert_allclose(given[first:, 2], np.diff(films[0].times)[first - 1 :], rtol=1e-5)
    assert np.isnan(store.arrays["poses"]).all()


def test_an_episode_shorter_than_the_lag_has_no_controls(films: list[Film], tmp_path: Path) -> None:
    times = films[0].times.copy()
    times[37:] += 9
    source = record(tmp_path / "s", [films[0]._replace(times=times)], False, angle=lambda e, t: t)
    store = make(source, tmp_path / "w", validation=0.0, control_lag=4)
    assert (store.arrays["controls"][37:] == 0).all()


@pytest.mark.parametrize("every", [1, 2])
def test_a_number_too_large_for_the_store_is_not_known(films: list[Film], tmp_path: Path, every: int) -> None:
    source = record(tmp_path / "s", films[:1], False, angle=lambda e, t: {8: 1e300, 20: -1e39}.get(t, t))
    store = make(source, tmp_path / "w", validation=0.0, control_lag=0, every=every)
    given = store.arrays["controls"]
    assert np.isfinite(given).all()
    assert np.flatnonzero(given[:, -1] == 0).tolist() == [0, 8 // every, 20 // every]
    assert given[-1, 0] == (39 if every == 1 else 37.5)
    assert np.isfinite(store.info["statistics"]["mean"]).all()
    poses = films[0].poses.copy()
    poses[8, 0, 3] = 1e300
    store = make(record(tmp_path / "t", [films[0]._replace(poses=poses)]), tmp_path / "v", validation=0.0)
    assert np.flatnonzero(store.arrays["controls"][:, -1] == 0).tolist() == [0, 8, 9]


def test_only_what_is_used_must_agree(films: list[Film], tmp_path: Path) -> None:
    source = tmp_path / "s"
    source.mkdir()
    record(source / "a", films[:1], angle=lambda e, t: t)
    record(source / "b", films[1:2], throttle=lambda e, t: t)
    assert make(source, tmp_path / "w", validation=0.0).info["control_kind"] == "pose"
    with raises_code("controls-mismatch") as caught:
        make(source, tmp_path / "v", validation=0.0, controls="recorded")
    assert "b/episode 0" in str(caught.value)
    record(source / "b", films[1:2], angle=lambda e, t: t, pose=lambda e, t: [t, 0, 0, 0, 0, 0])
    assert make(source, tmp_path / "v", validation=0.0, controls="recorded").info["control_kind"] == "recorded"
    with raises_code("pose-mismatch"):
        make(source, tmp_path / "x", validation=0.0)


def test_which_controls(films: list[Film], tmp_path: Path) -> None:
    source = record(tmp_path / "s", films[:1], forward=lambda e, t: t)
    assert make(source, tmp_path / "a", validation=0.0).info["control_kind"] == "pose"
    assert make(source, tmp_path / "b", validation=0.0, controls="recorded").info["control_kind"] == "recorded"
    with raises_code("no-controls") as caught:
        make(record(tmp_path / "t", films[:1]), tmp_path / "c", controls="recorded")
    assert "set dataset.controls=pose" in str(caught.value)
    with raises_code("no-controls"):
        make(record(tmp_path / "u", films[:1], False), tmp_path / "c")


def test_rows_without_a_pose_are_not_valid(films: list[Film], tmp_path: Path) -> None:
    source = record(tmp_path / "s", films[:1], pose=lambda e, t: None if t == 7 else films[0].poses[t].tolist())
    store = make(source, tmp_path / "w", validation=0.0)
    assert np.flatnonzero(store.arrays["controls"][:, -1] == 0).tolist() == [0, 7, 8]
    assert np.isnan(store.arrays["poses"][7]).all()
    assert "2 steps have no known control" in store.info["summary"]


def test_broken_pictures_are_left_out_and_counted(films: list[Film], tmp_path: Path) -> None:
    source = record(tmp_path / "s", films[4:], angle=lambda e, t: t)
    broken = [3, *range(30, 33)]
    for t in broken:
        (source / f"0_{t}.png").write_bytes((source / f"0_{t}.png").read_bytes()[:100])
    store = make(source, tmp_path / "w", validation=0.0, width=32, height=24, episode_gap=0.15)
    kept = np.delete(np.arange(80), broken)
    assert store.info["dropped"] == {"undecodable": 4}
    assert "4 do not decode" in store.info["summary"]
    np.testing.assert_array_equal(store.arrays["frames"], films[4].frames[kept])
    # one lost frame is a longer step; three leave a hole of 0.2 s, which ends the episode
    assert [item["length"] for item in store.index] == [29, 47]
    move = geometry.move_between(films[4].poses[2], films[4].poses[4])
    np.testing.assert_allclose(store.arrays["controls"][3, :6], move, atol=1e-5)
    again = make(source, tmp_path / "r", validation=0.0, episode_gap=0.15, controls="recorded")
    assert again.arrays["controls"][3, 0] == pytest.approx(2.5)  # of the controls at 2 and 3, which led to 4
    for t in range(40, 60):
        (source / f"0_{t}.png").write_bytes(b"")
    with raises_code("file-damaged") as caught:
        make(source, tmp_path / "x")
    assert "24 of 80" in str(caught.value)
    assert "frame 3 of" in str(caught.value)
    assert not (tmp_path / "x").exists()


def test_frames_are_cropped_and_never_enlarged(folder: Path, tmp_path: Path) -> None:
    store = make(folder, tmp_path / "w", width=16, height=16)
    assert store.arrays["frames"].shape[1:] == (16, 16, 3)
    with raises_code("too-large") as caught:
        make(folder, tmp_path / "x", width=64, height=48)
    assert "0_0.png" in str(caught.value)
    assert "dataset.width=32 dataset.height=24" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w"]


def test_a_recording_is_never_replaced_by_its_store(films: list[Film], tmp_path: Path) -> None:
    source = record(tmp_path / "s", films[:1])
    before = sorted(source.iterdir())
    make(source, tmp_path / "w", validation=0.0)
    inside = record(tmp_path / "w" / "mine", films[:1])
    for one, out in ((source, source), (source, source / "w"), (inside, tmp_path / "w")):
        with pytest.raises(DataError):
            data.prepare(one, out, Dataset(**SIZE), 0, True, quiet)
    assert sorted(source.iterdir()) == before
    assert (inside / "frames.jsonl").is_file()


def test_a_place_that_is_taken(folder: Path, tmp_path: Path) -> None:
    make(folder, tmp_path / "w")
    with pytest.raises(DataError):
        make(folder, tmp_path / "w")
    data.prepare(folder, tmp_path / "w", Dataset(**SIZE, validation=0.4), 0, True, quiet)
    assert Store.open(tmp_path / "w").info["settings"]["validation"] == 0.4


def test_a_walk_may_fill_in_its_poses_as_it_goes(
    films: list[Film], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rung.recipes.world.walk import episodes as walk

    def episodes(cfg: Dataset, seed: int, report: object) -> Any:
        for number, reel in enumerate(films):
            episode = Episode(f"map{number}", reel.times, [], poses=np.full_like(reel.poses, np.nan))

            def frames(reel: Film = reel, episode: Episode = episode) -> Any:
                for t, frame in enumerate(reel.frames):
                    assert episode.poses is not None
                    episode.poses[t] = reel.poses[t]
                    yield frame

            episode.frames = frames()
            yield episode

    monkeypatch.setattr(walk, "walk_episodes", episodes)
    data.prepare(None, tmp_path / "w", Dataset(**SIZE), 0, False, quiet)
    store = Store.open(tmp_path / "w")
    np.testing.assert_array_equal(store.arrays["poses"], np.concatenate([reel.poses for reel in films]))
    assert [item["label"] for item in store.index] == [f"map{i}" for i in range(5)]


# Real recordings


def consecutive_mse(store: Store, episodes: np.ndarray) -> float:
    frames = store.arrays["frames"]
    pairs = np.flatnonzero(np.diff(episodes) == 0)
    return float(np.mean([((frames[i + 1].astype(np.float64) - frames[i]) ** 2).mean() / 255**2 for i in pairs]))


def test_a_small_car(tmp_path: Path) -> None:
    source = shared_data("world_donkeycar")
    rows = [json.loads(line) for line in (source / "frames.jsonl").read_text().splitlines()]
    episodes = np.array([row["episode"] for row in rows])
    store = make(source, tmp_path / "w", width=160, height=120)
    assert len(store.arrays["frames"]) == 1956
    assert store.info["rate_hz"] == pytest.approx(20, rel=0.01)
    assert -10 * np.log10(consecutive_mse(store, episodes)) == pytest.approx(26.6, abs=0.05)  # data/README.md
    raw_ms = np.array([row["timestamp_ms"] for row in rows])
    steps = [
        np.concatenate([np.diff(x[episodes == e]) for e in range(3)]) for x in (raw_ms / 1e3, store.arrays["times"])
    ]
    assert steps[1].std() == pytest.approx(steps[0].std(), rel=1e-3)
    given = np.concatenate([store.arrays["controls"][rows][1:] for rows in rows_of(store, "train")])
    assert given[:, 2].std() == pytest.approx(steps[0].std(), rel=0.15)  # of a part of the drive
    for item in store.index:
        for t in range(item["start"] + 1, item["start"] + item["length"]):
            assert store.arrays["controls"][t, 0] == np.float32(rows[t - 1]["angle"])


def test_walks_in_freedoom(tmp_path: Path) -> None:
    source = shared_data("world_vizdoom")
    rows = [json.loads(line) for line in (source / "frames.jsonl").read_text().splitlines()]
    store = make(source, tmp_path / "w", width=128, height=96)
    assert store.info["divisors"] == [1, 2, 4, 8, 16, 32]
    assert [item["length"] for item in store.index] == [320] * 5
    assert -10 * np.log10(consecutive_mse(store, np.arange(1600) // 320)) == pytest.approx(19.0, abs=0.05)
    assert "20 frames a second are assumed" in store.info["summary"]
    done = np.array([row["control"] for row in rows])
    for item in store.index:  # what the player did between this frame and the next is in the next row
        first, last = item["start"], item["start"] + item["length"]
        given, keys = store.arrays["controls"][first + 1 : last], done[first : last - 1]
        assert np.corrcoef(given[:, 4], keys[:, 3])[0, 1] > 0.99
        assert np.corrcoef(given[:, 3], keys[:, 4])[0, 1] > 0.99
        poses = store.arrays["poses"][first:last]
        moves = geometry.move_between(poses[:-1], poses[1:])
        np.testing.assert_allclose(geometry.apply_move(poses[:-1], moves), poses[1:], atol=1e-9)
