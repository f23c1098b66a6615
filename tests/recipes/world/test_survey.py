"""If this fails, data is trained on that has a hole, a broken frame or a leak which the report should have named."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.data.store import Store
from rung.recipes.world.survey.survey import coarse, survey
from rung.report.chart import bar_chart, histograms
from tests.errors import raises_code
from tests.recipes.world.stores import NAMES, controls_of, write_films, write_store
from tests.recipes.world.synthetic import Film, film


def quiet(what: str, done: int, total: int) -> None:
    assert 0 < done <= total


def surveyed(store: Path, out: Path) -> dict[str, Any]:
    survey(Store.open(store, "world"), out, quiet)
    figures: dict[str, Any] = json.loads((out / "report.json").read_text())
    return figures


def rules(figures: dict[str, Any]) -> dict[str, str]:
    return {finding["rule"]: f"{finding['text']} {finding['remedy']}" for finding in figures["findings"]}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store and its report."""
    folder = tmp_path_factory.mktemp("healthy")
    store = write_store(folder / "films", (160, 100), height=24, width=32)
    survey(Store.open(store), folder / "films-report", quiet)
    return store, folder / "films-report"


def test_the_report_shows_every_picture_and_every_picture_can_be_drawn(healthy: tuple[Path, Path]) -> None:
    out = healthy[1]
    text = (out / "report.md").read_text()
    shown = set(re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text))
    assert shown == {path.name for path in out.glob("*.svg")}
    assert len(shown) == 5
    for name in shown:
        root = ElementTree.parse(out / name).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "nan" not in (out / name).read_text()
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")


def test_a_healthy_film_has_little_to_complain_of(healthy: tuple[Path, Path]) -> None:
    figures = json.loads((healthy[1] / "report.json").read_text())
    assert figures["alignment"]["verdict"] == "aligned"
    # the synthetic camera never strafes and never rests; nothing else is wrong with it
    assert set(rules(figures)) <= {"never-still", "constant-controls", "splits-differ"}
    assert figures["frames"]["frames"] == 260
    assert figures["frames"]["broken"] == figures["frames"]["cuts"] == figures["frames"]["strays"] == []


def test_ways_are_counted_as_the_film_went(healthy: tuple[Path, Path]) -> None:
    out = healthy[1]
    figures = json.loads((out / "report.json").read_text())
    moves = film(160, 0, 24, 32).moves[1:]
    train = figures["coverage"]["train"]
    assert train["steps"] == 159
    brisk = np.percentile(np.abs(moves[:, 0]), 90)
    assert train["ways"]["forward"]["share"] == pytest.approx((moves[:, 0] > brisk / 10).mean())
    assert train["ways"]["backward"]["share"] == pytest.approx((moves[:, 0] < -brisk / 10).mean())
    assert train["ways"]["forward"]["total"] == pytest.approx(moves[moves[:, 0] > 0, 0].sum(), rel=1e-4)
    right = np.degrees(moves[moves[:, 1] > 0, 1].sum())
    assert train["ways"]["turn right"]["total"] == pytest.approx(right, rel=0.02)  # pitched: not quite about y
    assert sum(map(sum, train["forward_by_turn"])) == pytest.approx(1)
    assert figures["timing"]["median_s"] == pytest.approx(0.05, abs=0.002)
    assert figures["channels"]["forward"]["max"] == pytest.approx(moves[:, 0].max(), rel=1e-5)


def test_the_same_store_gives_the_same_bytes_and_a_new_report_takes_the_place_of_the_old(
    healthy: tuple[Path, Path], tmp_path: Path
) -> None:
    store, out = healthy
    again = tmp_path / "again"
    again.mkdir()
    (again / "report.json").write_text("{}")
    (again / "left-over.svg").write_text("old")
    summary = survey(Store.open(store), again, quiet)
    assert {p.name: p.read_bytes() for p in again.iterdir()} == {p.name: p.read_bytes() for p in out.iterdir()}
    assert [p.name for p in tmp_path.iterdir()] == ["again"]
    assert "aligned" in summary


def test_an_interrupted_report_leaves_the_old_one(
    healthy: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "report.json").write_text("old")
    rename = Path.rename

    def interrupt(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr("rung.data.store.exchange", lambda a, b: False)  # as on a disk that cannot
    monkeypatch.setattr(Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        survey(Store.open(healthy[0]), tmp_path / "r", quiet)
    assert [p.name for p in tmp_path.iterdir()] == ["r"]
    assert (tmp_path / "r" / "report.json").read_text() == "old"


def test_a_folder_of_somebody_else_is_left_alone(healthy: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with raises_code("folder-exists"):
        survey(Store.open(healthy[0]), tmp_path, quiet)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("shift", [-1, 2])
def test_late_controls_are_found_with_the_remedy(shift: int, tmp_path: Path) -> None:
    figures = surveyed(write_store(tmp_path / "s", (160, 100), height=24, width=32, shift=shift), tmp_path / "r")
    assert figures["alignment"]["lag"] == -shift
    assert f"{-shift / figures['rate_hz']:+.3f} s to the times of the poses" in rules(figures)["misaligned"]


def recorded(path: Path, films: list[Film], controls: list[np.ndarray], **info: Any) -> Path:
    """A store with recorded controls: steering and throttle."""
    names = ["steering", "throttle", "dt", "valid"]
    columns = [NAMES.index(name) for name in ("turn_right", "forward", "dt", "valid")]
    given = {
        "controls": names,
        "control_kind": "recorded",
        "intents": {"turn": ["steering", 1], "forward": ["throttle", 1]},
        "settings": {"control_lag": 1},
        **info,
    }
    return write_films(path, films, [rows[:, columns] for rows in controls], ["train"] * len(films), **given)


@pytest.mark.parametrize(("shift", "remedy"), [(-3, "dataset.control_lag=4 (it is 1)"), (2, "cannot go below 0")])
def test_recorded_controls_name_the_key_to_change(shift: int, remedy: str, tmp_path: Path) -> None:
    one = film(200, 0, 24, 32)
    rows = np.roll(controls_of(one), shift, 0)
    figures = surveyed(recorded(tmp_path / "s", [one], [rows]), tmp_path / "r")
    assert remedy in rules(figures)["misaligned"]
    assert "no-held-out" in rules(figures)


def test_a_way_that_nobody_went_is_named(tmp_path: Path) -> None:
    one = film(200, 0, 24, 32)
    rows = controls_of(one)
    rows[:, NAMES.index("forward")] = np.abs(rows[:, NAMES.index("forward")])
    figures = surveyed(recorded(tmp_path / "s", [one], [rows]), tmp_path / "r")
    assert rules(figures)["one-way"].startswith("backward is 0 % of the steps")
    assert "turn" not in rules(figures)["one-way"]


def spoiled(number: int, one: Film) -> Film:
    """A black frame, a grey one with noise, three repeated ones, a stray one, and a cut."""
    if number:
        return one
    frames = one.frames.copy()
    frames[20] = 3
    frames[30] = 127 + np.random.default_rng(0).integers(0, 3, frames[30].shape)
    frames[51:54] = frames[50]
    frames[70] = 255 - frames[69]
    frames[100:] = 255 - frames[100:]
    return one._replace(frames=frames)


def test_bad_frames_are_named_by_number(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", (160, 100), height=24, width=32, change=spoiled)
    figures = surveyed(store, tmp_path / "r")
    found = figures["frames"]
    assert found["broken"] == [20, 30]
    assert found["black"] == [20]
    assert found["repeated"] == [51, 52, 53]
    assert found["longest_repeat"] == {"length": 3, "row": 51}
    assert found["strays"] == [70]
    assert found["cuts"] == [100]
    assert "film 0 frame 20, film 0 frame 30" in rules(figures)["broken-frames"]
    assert {"repeated-frames", "stray-frames", "cuts"} <= set(rules(figures))


def test_standing_still_is_no_repetition(tmp_path: Path) -> None:
    def rest(number: int, one: Film) -> Film:
        frames, poses = one.frames.copy(), one.poses.copy()
        frames[40:60], poses[40:60] = frames[39], poses[39]
        return one._replace(frames=frames, poses=poses)

    figures = surveyed(write_store(tmp_path / "s", (160, 100), height=24, width=32, change=rest), tmp_path / "r")
    assert figures["frames"]["unchanged"] == 40
    assert figures["frames"]["repeated"] == []
    assert figures["coverage"]["train"]["still"] == pytest.approx(20 / 159, abs=0.02)
    assert "never-still" not in rules(figures)


def test_wild_controls_and_gaps_in_time_are_named(tmp_path: Path) -> None:
    one = film(200, 0, 24, 32)
    times = one.times.copy()
    times[120:] += 0.7
    one = one._replace(times=times)
    rows = controls_of(one)
    rows[60, NAMES.index("forward")] = 500
    figures = surveyed(write_films(tmp_path / "s", [one], [rows], ["train"]), tmp_path / "r")
    assert "forward (1, first at film 0 frame 60)" in rules(figures)["wild-controls"]
    assert figures["timing"]["gap_rows"] == [120]
    assert "film 0 frame 120" in rules(figures)["gaps"]


def test_splits_that_touch_are_a_leak(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", (120, 100), height=24, width=32)
    index = [json.loads(line) for line in (store / "index.jsonl").read_text().splitlines()]
    opened = Store.open(store)
    opened.index = [{**record, "episode": 0} for record in index]  # two pieces of one episode
    opened.arrays["times"] = np.arange(220) / 20
    survey(opened, tmp_path / "r", quiet)
    figures = json.loads((tmp_path / "r" / "report.json").read_text())
    assert figures["nearest"]["seconds"] == pytest.approx(0.05)
    assert "train and validation are only 0.05 s apart" in rules(figures)["splits-near"]
    assert "memory" not in rules(figures)["splits-near"]  # rows never cross records


@pytest.mark.parametrize("pause", [1.5, -70.0])
def test_parts_of_one_recording_that_touch_are_a_leak_too(tmp_path: Path, pause: float) -> None:
    opened = Store.open(write_store(tmp_path / "s", (120, 100), height=24, width=32))
    opened.index = [{**record, "source": 0} for record in opened.index]  # two episodes of one recording
    times = np.arange(220) / 20
    times[120:] += pause - 0.05
    opened.arrays["times"] = times
    survey(opened, tmp_path / "r", quiet)
    figures = json.loads((tmp_path / "r" / "report.json").read_text())
    assert figures["nearest"]["seconds"] == pytest.approx(max(pause, 0.05))
    assert ("splits-near" in rules(figures)) == (max(pause, 0.05) * figures["rate_hz"] < 32)


def test_short_and_tiny_stores_get_a_report_too(tmp_path: Path) -> None:
    figures = surveyed(write_store(tmp_path / "s", (5, 3), height=8, width=8), tmp_path / "r")
    assert figures["alignment"]["verdict"] == "short"
    assert "alignment-unknown" in rules(figures)


def test_odd_sizes_are_made_coarse_by_cutting_the_edge(tmp_path: Path) -> None:
    store = Store.open(write_store(tmp_path / "s", (5, 3), height=51, width=67))
    assert store.info["divisors"] == [1]
    assert coarse(store, 12).shape == (8, 12, 16, 3)
    wanted = np.asarray(store.arrays["frames"][4, :4, 4:8], np.float64).mean((0, 1))
    assert coarse(store, 12)[4, 0, 1] == pytest.approx(wanted, abs=1)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=8))
def test_charts_are_whole_whatever_the_numbers(values: list[float]) -> None:
    names = [f"<{k}&" for k in range(len(values))]
    for text in (
        bar_chart("bars & more", names, {"<one>": values, "two": values}),
        histograms("counts", {name: {"counts": values, "edges": range(len(values) + 1)} for name in names}),
    ):
        root = ElementTree.fromstring(text)
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        for part in root.iter():
            for key, most in (("x", width), ("y", height)):
                if (value := part.get(key)) is not None:
                    assert math.isfinite(float(value))
                    assert -1 <= float(value) <= most + 1
