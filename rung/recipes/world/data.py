"""Prepares world data: recordings, or the embedded walk, become a store of frames, poses and controls.

Frames are read once, in order, and written as they come; only times, poses and controls stay in memory. Which split a
frame belongs to is decided after that, from what could be read. Every frame of the source is in a record or in a count
of `dropped`.

The surprising thing: frames in the gaps between splits lie in the arrays and in no record. Records are what counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rung.data.store import StoreWriter, check_apart
from rung.errors import DataError
from rung.recipe import Report
from rung.recipes.world import geometry
from rung.recipes.world.config import Dataset
from rung.recipes.world.packing import controls, split
from rung.recipes.world.packing.reel import Record, Reel, divisors, measure
from rung.recipes.world.packing.summary import summarise
from rung.recipes.world.sources import timing
from rung.recipes.world.sources.episode import Episode, Frame
from rung.recipes.world.sources.images import ImageFiles

MOST_BROKEN = 0.2


@dataclass
class Stretch:
    """Frames of one episode that were kept, without a break; rows from `first` on."""

    label: str
    source: int  # number of the source's episode, of which this may be a part
    first: int
    times: np.ndarray  # (K,)
    up: tuple[float, float, float]
    names: list[str]  # of recorded controls
    poses: np.ndarray | None = None  # (K, 4, 4)
    led: np.ndarray | None = None  # (K, C) recorded controls that led to each frame

    def part(self, record: Record) -> slice:
        return slice(record.start - self.first, record.start - self.first + record.length)


@dataclass
class Account:
    """What was met on the way, for the manifest and the summary."""

    dropped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    names: list[str] | None = None  # of recorded controls
    up: tuple[float, float, float] | None = None
    num_read: int = 0
    num_backwards: int = 0
    first_broken: str = ""


def prepare(source: Path | None, out: Path, cfg: Dataset, seed: int, replace: bool, report: Report) -> str:
    """Writes the store and returns what a person wants to know of it."""
    split.check_shares(cfg)
    if source is not None:
        check_apart(source, out)
    with StoreWriter(out, kind="world", replace=replace) as writer:  # first: a name that is taken is found at once
        account = Account()
        episodes, total = _episodes(source, cfg, seed, report)
        stretches = _read(episodes, Reel(writer, cfg.width, cfg.height, report, total), cfg, account)
        _check_read(stretches, cfg, account)
        kind = _kind(stretches, cfg)
        _agree(stretches, kind, account)
        labels, way = split.assign(
            [s.times for s in stretches], [s.label for s in stretches], cfg, seed, [s.source for s in stretches]
        )
        records = _records(stretches, labels, cfg, account)
        rows = _append_rows(writer, stretches, records, kind, account)
        for record in records:
            stretch = stretches[record.episode]
            writer.record(
                record.split, record.start, record.length,
                episode=record.episode, source=stretch.source, label=stretch.label,
            )  # fmt: skip
        info: dict[str, Any] = {
            "height": cfg.height,
            "width": cfg.width,
            "divisors": divisors(cfg.width, cfg.height),
            "source": "a walk through Freedoom" if source is None else source.resolve().name,
            "settings": asdict(cfg) | {"seed": seed},
            "split_by": way,
            "up": list(account.up or (0.0, -1.0, 0.0)),
            "rate_hz": _rate(stretches),
            "dropped": {why: number for why, number in account.dropped.items() if number},
            "notes": account.notes,
            **_control_info(rows, records, kind, account, cfg),
            "baselines": measure(writer, records, report),
        }
        counts = {name: [record.length for record in records if record.split == name] for name in split.SPLITS}
        seconds = sum(_seconds(stretches[record.episode], record) for record in records)
        writer.info.update(info, summary=summarise(info, counts, len(stretches), seconds))
        return str(writer.info["summary"])


# Reading


def _episodes(source: Path | None, cfg: Dataset, seed: int, report: Report) -> tuple[Iterable[Episode], int]:
    """The episodes, and how many frames to expect; 0 for a walk, which shows its own progress."""
    if source is None:
        from rung.recipes.world.walk.episodes import walk_episodes

        return walk_episodes(cfg, seed, report), 0
    from rung.recipes.world.sources.find import find_episodes

    episodes = find_episodes(source, cfg)
    return episodes, sum(len(range(0, episode.num_frames, cfg.every)) for episode in episodes)


def _read(episodes: Iterable[Episode], reel: Reel, cfg: Dataset, account: Account) -> list[Stretch]:
    stretches = []
    for source, episode in enumerate(episodes):
        first, kept = reel.num_rows, _read_frames(episode, reel, cfg, account)
        poses = timing.poses_at_frames(episode, cfg.max_gap)
        recorded = timing.controls_at_frames(episode, cfg.max_gap)
        account.notes += [note for note in episode.notes if note not in account.notes]
        for uncut, numbers in kept:
            led = None
            if recorded is not None:
                led = controls.lead_to_kept(recorded[uncut], numbers - uncut.start, cfg.control_lag)
            is_hole = (np.diff(numbers) > cfg.every) & (np.diff(episode.times[numbers]) > cfg.episode_gap)
            for part in np.split(np.arange(len(numbers)), np.flatnonzero(is_hole) + 1):
                chosen = numbers[part]
                stretch = Stretch(
                    episode.label, source, first, episode.times[chosen], episode.up, episode.control_names
                )
                stretch.poses = None if poses is None else poses[chosen]
                stretch.led = None if led is None else led[part]
                stretches.append(stretch)
                first += len(chosen)
    reel.flush()
    return stretches


def _read_frames(episode: Episode, reel: Reel, cfg: Dataset, account: Account) -> list[tuple[slice, np.ndarray]]:
    """Writes the frames; returns the stretches between pauses, each with the numbers of its frames that were kept."""
    stretches, num_backwards = timing.cut(episode.times, cfg.episode_gap, episode.breaks)
    wanted = [np.arange(part.start, part.stop, cfg.every) for part in stretches]
    numbers = np.concatenate([np.zeros(0, np.int64), *wanted])
    decoded = np.zeros(episode.num_frames, bool)
    for number, image in zip(numbers, _chosen(episode.frames, numbers), strict=True):
        where = f"frame {number} of {episode.label}"
        if isinstance(episode.frames, ImageFiles):
            where += f" ({episode.frames.paths[number].name})"
        if image is None:
            account.first_broken = account.first_broken or where
            continue
        decoded[number] = True
        reel.add(image, where)
    account.num_read += len(numbers)
    account.num_backwards += num_backwards
    account.dropped.update(episode.dropped)
    account.dropped["undecodable"] += len(numbers) - int(decoded.sum())
    account.dropped["every"] += episode.num_frames - len(numbers)
    return [(part, chosen[decoded[chosen]]) for part, chosen in zip(stretches, wanted)]


def _chosen(frames: Iterable[Frame], numbers: np.ndarray) -> Iterator[Frame]:
    """The frames with these numbers: looked up where that is possible, else all are gone through."""
    if isinstance(frames, Sequence):
        yield from (frames[int(number)] for number in numbers)
        return
    wanted = set(numbers.tolist())
    yield from (frame for number, frame in enumerate(frames) if number in wanted)


def _agree(stretches: list[Stretch], kind: str, account: Account) -> None:
    """All episodes of a store have one up, or one set of channels, whichever is used."""
    for stretch in stretches:
        if kind == "recorded" and stretch.led is not None:
            account.names = account.names or stretch.names
            if account.names != stretch.names:
                raise DataError(
                    f"{stretch.label} has the controls {', '.join(stretch.names)}, an episode before it "
                    f"{', '.join(account.names)}; prepare them one by one"
                )
        if kind == "pose" and stretch.poses is not None:
            account.up = account.up or stretch.up
            if account.up != stretch.up:
                raise DataError(
                    f"{stretch.label} has up {stretch.up}, an episode before it {account.up}; prepare them one by one"
                )


def _check_read(stretches: list[Stretch], cfg: Dataset, account: Account) -> None:
    num_broken = account.dropped["undecodable"]
    if num_broken > MOST_BROKEN * account.num_read:
        raise DataError(
            f"{num_broken} of {account.num_read} pictures do not decode (at most {MOST_BROKEN:.0%} may be broken); the "
            f"first is {account.first_broken}: mend or remove them"
        )
    if not any(len(stretch.times) > 1 for stretch in stretches):
        raise DataError(
            f"no two frames follow each other within dataset.episode_gap={cfg.episode_gap:g} s; raise it, or check the "
            "times"
        )
    if account.num_backwards:
        account.notes.append(f"time runs backwards {account.num_backwards} times; a new episode begins at each")


# Records and controls


def _records(stretches: list[Stretch], labels: list[np.ndarray], cfg: Dataset, account: Account) -> list[Record]:
    records = []
    for episode, (stretch, numbers) in enumerate(zip(stretches, labels)):
        bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for start, stop in pairwise(bounds):
            if stop - start < 2 or numbers[start] == split.NOWHERE:
                account.dropped["split_gap" if numbers[start] == split.NOWHERE else "alone"] += stop - start
                continue
            records.append(Record(split.SPLITS[numbers[start]], episode, stretch.first + start, stop - start))
    for name, share in zip(split.SPLITS, (1.0, cfg.validation, cfg.test)):
        if share > 0 and not any(record.split == name for record in records):
            num_frames = sum(len(stretch.times) for stretch in stretches)
            raise DataError(
                f"the {name} split is empty: {num_frames} frames in {len(stretches)} episodes are too few with "
                f"dataset.split_gap={cfg.split_gap:g}; lower it, change dataset.validation or test, or bring more data"
            )
    account.notes += _shrunken(records, cfg)
    return records


def _shrunken(records: list[Record], cfg: Dataset) -> Iterator[str]:
    """A block of time ends where its episode does, so many short episodes may leave little of what was asked for."""
    total = sum(record.length for record in records)
    for name, wanted in (("validation", cfg.validation), ("test", cfg.test)):
        share = sum(record.length for record in records if record.split == name) / total
        if share < wanted / 2:
            yield (
                f"{name} has {share:.1%} of the frames, dataset.{name}={wanted:g} asked for {wanted:.1%}: the "
                "episodes are too short, or too few, to give more"
            )


def _kind(stretches: list[Stretch], cfg: Dataset) -> str:
    has = {
        "pose": any(stretch.poses is not None for stretch in stretches),
        "recorded": any(stretch.led is not None for stretch in stretches),
    }
    if cfg.controls != "auto" and not has[cfg.controls]:
        other = next((kind for kind in has if has[kind]), None)
        remedy = f"set dataset.controls={other}" if other else "add a pose or controls to the table"
        raise DataError(f"dataset.controls={cfg.controls}, but the recording has none; {remedy}")
    if not any(has.values()):
        raise DataError(
            "the recording has neither poses nor controls, so there is nothing to steer by; add some to the table"
        )
    return cfg.controls if cfg.controls != "auto" else "pose" if has["pose"] else "recorded"


def _append_rows(
    writer: StoreWriter, stretches: list[Stretch], records: list[Record], kind: str, account: Account
) -> np.ndarray:
    """Writes times, poses and controls of all rows; returns the controls."""
    num_rows = sum(len(stretch.times) for stretch in stretches)
    num_channels = len(geometry.CHANNELS) if kind == "pose" else len(account.names or ()) + 2
    rows = np.zeros((num_rows, num_channels), np.float32)
    nowhere = np.full((max(len(s.times) for s in stretches), 4, 4), np.nan)
    writer.array("times", np.float64)
    writer.array("poses", np.float64, (4, 4))
    writer.array("controls", np.float32, (num_channels,))
    for stretch in stretches:
        writer.append("times", stretch.times)
        writer.append("poses", nowhere[: len(stretch.times)] if stretch.poses is None else stretch.poses)
    for record in records:
        stretch = stretches[record.episode]
        part = stretch.part(record)
        if kind == "pose" and stretch.poses is not None:
            up = np.array(account.up)
            rows[record.rows] = controls.pose_controls(stretch.poses[part], stretch.times[part], up)
        elif kind == "recorded" and stretch.led is not None:
            rows[record.rows] = controls.recorded_controls(stretch.led[part], stretch.times[part])
    writer.append("controls", rows)
    return rows


def _control_info(rows: np.ndarray, records: list[Record], kind: str, account: Account, cfg: Dataset) -> dict[str, Any]:
    names = list(geometry.CHANNELS) if kind == "pose" else [*(account.names or ()), "dt", "valid"]
    train = np.concatenate([rows[record.rows] for record in records if record.split == "train"])
    valid = train[train[:, -1] == 1]
    if not len(valid):
        raise DataError(
            f"no training step has known {'poses' if kind == 'pose' else 'controls'}; check the table for gaps, and "
            f"its clock against that of the frames (dataset.max_gap={cfg.max_gap:g} s)"
        )
    num_unknown = sum(int((rows[record.rows][1:, -1] == 0).sum()) for record in records)
    return {
        "controls": names,
        "control_kind": kind,
        "intents": controls.POSE_INTENTS if kind == "pose" else controls.intents(account.names or ()),
        "statistics": controls.statistics(valid, names, controls.POSE_UNITS if kind == "pose" else ()),
        "num_unknown": num_unknown,
    }


def _seconds(stretch: Stretch, record: Record) -> float:
    times = stretch.times[stretch.part(record)]
    return float(times[-1] - times[0])


def _rate(stretches: list[Stretch]) -> float:
    step_s = float(np.median(np.concatenate([np.diff(stretch.times) for stretch in stretches])))
    if step_s <= 0:
        raise DataError("half of the frames or more have the time of the frame before them; check the column of times")
    return 1 / step_s
