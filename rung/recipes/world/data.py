"""Prepares world data: recordings, or the embedded walk, become a store of frames, poses and controls.

Frames are read once, in order, and written as they come; only times, poses and controls stay in memory. Splits are
decided after that, from what could be read. Every frame of the source is in a record or in a count of `dropped`. The
arrays also hold the frames of the gaps between splits, which belong to no record: go by records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rung.data.store import StoreWriter, check_apart
from rung.errors import ConfigError, DataError
from rung.recipe import Report
from rung.recipes.world import controls, features, geometry, split
from rung.recipes.world.config import Dataset
from rung.recipes.world.memory import shrink
from rung.recipes.world.sources.episode import Episode, cut
from rung.recipes.world.sources.frames import ImageFiles, fit, read_image
from rung.recipes.world.stream import array_of

CHUNK = 256  # frames in memory at a time
SMALLEST_SIDE = 3
MOST_BROKEN = 0.2  # of the pictures
REASONS = {
    "undecodable": "do not decode",
    "every": "skipped by dataset.every",
    "split_gap": "between the splits",
    "alone": "alone, without a neighbour",
}


@dataclass
class Stretch:
    """Frames of one episode that were kept, without a break; rows from `first` on."""

    label: str
    source: int  # number of the source's episode, of which this may be a part
    first: int
    times: np.ndarray  # (K,)
    up: tuple[float, float, float]
    names: list[str]  # of recorded controls
    split: str | None  # None: to be chosen
    poses: np.ndarray | None  # (K, 4, 4)
    led: np.ndarray | None  # (K, C) recorded controls that led to each frame


class Record(NamedTuple):
    """A part of a stretch in one split."""

    split: str
    episode: int  # number of the stretch
    start: int  # row in the store
    length: int
    part: slice  # of the stretch

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.length)


def prepare(source: Path | None, out: Path, cfg: Dataset, seed: int, replace: bool, report: Report) -> str:
    """Writes the store and returns what a person wants to know of it."""
    if cfg.validation + cfg.test >= 1:
        raise ConfigError(
            f"dataset.validation={cfg.validation:g} and dataset.test={cfg.test:g} leave nothing to train on; together "
            "they must be below 1",
            code="bad-value",
        )
    if source is not None:
        check_apart(source, out)
    with StoreWriter(out, kind="world", replace=replace) as writer:  # first: a name that is taken is found at once
        episodes: Iterable[Episode]
        if source is None:
            from rung.recipes.world.walk.episodes import walk_episodes

            episodes, total = walk_episodes(cfg, seed, report), 0  # it shows its own progress
        else:
            from rung.recipes.world.sources.find import find_episodes

            episodes = find_episodes(source, cfg)
            total = sum(len(range(0, episode.num_frames, cfg.every)) for episode in episodes)
        reader = Reader(writer, cfg, report, total)
        stretches = reader.read(episodes)
        kind = _kind(stretches, cfg)
        first = _check_agreement(stretches, kind)
        free = [s for s in stretches if s.split is None]
        chosen, way = split.assign(
            [s.times for s in free], [s.label for s in free], cfg, seed, [s.source for s in free]
        )
        given = iter(chosen)
        labels = [
            next(given) if s.split is None else np.full(len(s.times), split.SPLITS.index(s.split)) for s in stretches
        ]
        records = _records(stretches, labels, cfg, reader.dropped)
        total = sum(record.length for record in records)
        for name, wanted in (("validation", cfg.validation), ("test", cfg.test)):
            share = sum(record.length for record in records if record.split == name) / total
            # A block of time ends where its episode does, so many short episodes may leave little of it.
            if share < wanted / 2:
                reader.notes.append(
                    f"{name} has {share:.1%} of the frames, dataset.{name}={wanted:g} asked for {wanted:.1%}: the "
                    "episodes are too short, or too few, to give more"
                )
        about_controls = _write_rows(writer, stretches, records, kind, first, cfg)
        seconds = 0.0
        for record in records:
            stretch = stretches[record.episode]
            times = stretch.times[record.part]
            seconds += float(times[-1] - times[0])
            writer.record(
                record.split, record.start, record.length,
                episode=record.episode, source=stretch.source, label=stretch.label,
            )  # fmt: skip
        step_s = float(np.median(np.concatenate([np.diff(stretch.times) for stretch in stretches])))
        if step_s <= 0:
            raise DataError(
                "half of the frames or more have the time of the frame before them; check the column of times",
                code="bad-times",
            )
        info: dict[str, Any] = {
            "height": cfg.height,
            "width": cfg.width,
            "divisors": divisors(cfg.width, cfg.height),
            "source": "a walk through Freedoom" if source is None else source.resolve().name,
            "settings": asdict(cfg) | {"seed": seed},
            "split_by": way,
            "up": list(first.up) if kind == "pose" else [0.0, -1.0, 0.0],
            "rate_hz": 1 / step_s,
            "dropped": {why: number for why, number in reader.dropped.items() if number},
            "notes": reader.notes,
            **about_controls,
            "baselines": _measure(writer, records, report),
            "features": _features(writer, records, cfg, seed, report),
        }
        writer.info.update(info, summary=_summary(info, records, len(stretches), seconds))
        return str(writer.info["summary"])


class Reader:
    """Writes the frames of episodes in chunks, at every size, and counts what is left out on the way."""

    def __init__(self, writer: StoreWriter, cfg: Dataset, report: Report, total: int) -> None:
        self.dropped: Counter[str] = Counter()
        self.notes: list[str] = []
        self._writer, self._cfg, self._report, self._total = writer, cfg, report, total
        self._num_rows = self._num_read = self._num_backwards = 0
        self._first_broken = ""
        self._waiting: list[np.ndarray] = []
        for divisor in divisors(cfg.width, cfg.height):
            writer.array(array_of(divisor), np.uint8, (cfg.height // divisor, cfg.width // divisor, 3))

    def read(self, episodes: Iterable[Episode]) -> list[Stretch]:
        cfg = self._cfg
        stretches = [stretch for source, episode in enumerate(episodes) for stretch in self._read(source, episode)]
        self._flush()
        num_broken = self.dropped["undecodable"]
        if num_broken > MOST_BROKEN * self._num_read:
            raise DataError(
                f"{num_broken} of {self._num_read} pictures do not decode (at most {MOST_BROKEN:.0%} may be broken); "
                f"the first is {self._first_broken}: fix or remove them",
                code="file-damaged",
            )
        if not any(len(stretch.times) > 1 for stretch in stretches):
            raise DataError(
                f"no two frames follow each other within dataset.episode_gap={cfg.episode_gap:g} s; raise it, or check "
                "the times",
                code="too-few",
            )
        if self._num_backwards:
            self.notes.append(f"time jumps backwards {self._num_backwards} times; each jump starts a new episode")
        return stretches

    def _read(self, source: int, episode: Episode) -> Iterator[Stretch]:
        cfg, first = self._cfg, self._num_rows
        parts, num_backwards = cut(episode.times, cfg.episode_gap, episode.breaks)
        wanted = [np.arange(part.start, part.stop, cfg.every) for part in parts]
        is_kept = self._write(episode, np.concatenate([np.zeros(0, np.int64), *wanted]))
        self._num_backwards += num_backwards
        poses, recorded = episode.poses_at_frames(cfg.max_gap), episode.controls_at_frames(cfg.max_gap)
        self.notes += [note for note in episode.notes if note not in self.notes]
        for uncut, numbers in zip(parts, wanted):
            numbers = numbers[is_kept[numbers]]
            led = None
            if recorded is not None:
                led = controls.lead_to_kept(recorded[uncut], numbers - uncut.start, cfg.control_lag)
            is_hole = (np.diff(numbers) > cfg.every) & (np.diff(episode.times[numbers]) > cfg.episode_gap)
            for part in np.split(np.arange(len(numbers)), np.flatnonzero(is_hole) + 1):
                chosen = numbers[part]
                yield Stretch(
                    episode.label, source, first, episode.times[chosen], episode.up, episode.control_names,
                    episode.split, None if poses is None else poses[chosen], None if led is None else led[part],
                )  # fmt: skip
                first += len(chosen)

    def _write(self, episode: Episode, numbers: np.ndarray) -> np.ndarray:
        """Writes the frames of these numbers; (N,) which frames of the episode were."""
        is_kept = np.zeros(episode.num_frames, bool)
        paths = episode.frames.paths if isinstance(episode.frames, ImageFiles) else None
        if paths is not None:
            images = (read_image(paths[number]) for number in numbers)
        else:
            chosen = set(numbers.tolist())
            images = (frame for number, frame in enumerate(episode.frames) if number in chosen)
        for number, image in zip(numbers, images, strict=True):
            where = f"frame {number} of {episode.label}" + (f" ({paths[number].name})" if paths is not None else "")
            if image is None:
                self._first_broken = self._first_broken or where
                continue
            is_kept[number] = True
            self._waiting.append(fit(image, self._cfg.width, self._cfg.height, where))
            self._num_rows += 1
            if len(self._waiting) == CHUNK:
                self._flush()
        self._num_read += len(numbers)
        self.dropped.update(episode.dropped)
        self.dropped["undecodable"] += len(numbers) - int(is_kept.sum())
        self.dropped["every"] += episode.num_frames - len(numbers)
        return is_kept

    def _flush(self) -> None:
        if self._waiting:
            frames = torch.from_numpy(np.stack(self._waiting))
            for divisor in divisors(self._cfg.width, self._cfg.height):
                self._writer.append(array_of(divisor), shrink(frames, divisor).numpy())
        self._waiting = []
        if self._total:
            self._report("reading frames", self._num_rows, self._total)


def divisors(width: int, height: int) -> list[int]:
    """1, 2, 4, ... while both sides stay whole and not too small."""
    found = [1]
    while not (width % (d := 2 * found[-1]) or height % d) and min(width, height) // d >= SMALLEST_SIDE:
        found.append(d)
    return found


def _kind(stretches: list[Stretch], cfg: Dataset) -> str:
    """Whether the controls are those of poses or recorded ones."""
    has = {
        "pose": any(stretch.poses is not None for stretch in stretches),
        "recorded": any(stretch.led is not None for stretch in stretches),
    }
    kind = cfg.controls if cfg.controls != "auto" else "pose" if has["pose"] else "recorded"
    if not has[kind]:
        other = next((other for other in has if has[other]), None)
        problem = f"dataset.controls={kind}, but the recording has none; set dataset.controls={other}"
        nothing = "the recording has neither poses nor controls to steer with; add some to the table"
        raise DataError(problem if other else nothing, code="no-controls")
    return kind


def _check_agreement(stretches: list[Stretch], kind: str) -> Stretch:
    """All episodes of a store must have the same up, or the same channels, whichever is used; returns the first."""
    used = [s for s in stretches if (s.poses if kind == "pose" else s.led) is not None]
    first = used[0]
    for stretch in used:
        if kind == "recorded" and stretch.names != first.names:
            raise DataError(
                f"{stretch.label} has the controls {', '.join(stretch.names)}, {first.label} "
                f"{', '.join(first.names)}; prepare them one by one",
                code="controls-mismatch",
            )
        if kind == "pose" and stretch.up != first.up:
            raise DataError(
                f"{stretch.label} has up {stretch.up}, {first.label} {first.up}; prepare them one by one",
                code="pose-mismatch",
            )
    return first


def _records(stretches: list[Stretch], labels: list[np.ndarray], cfg: Dataset, dropped: Counter[str]) -> list[Record]:
    records = []
    for episode, (stretch, numbers) in enumerate(zip(stretches, labels)):
        bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for start, stop in pairwise(bounds):
            if stop - start < 2 or numbers[start] == split.NOWHERE:
                dropped["split_gap" if numbers[start] == split.NOWHERE else "alone"] += stop - start
                continue
            name = split.SPLITS[numbers[start]]
            records.append(Record(name, episode, stretch.first + start, stop - start, slice(start, stop)))
    for name, share in zip(split.CHOSEN, (1.0, cfg.validation, cfg.test)):
        if share > 0 and not any(record.split == name for record in records):
            num_frames = sum(len(stretch.times) for stretch in stretches)
            raise DataError(
                f"the {name} split is empty: {num_frames} frames in {len(stretches)} episodes are too few with "
                f"dataset.split_gap={cfg.split_gap:g}; lower it, change dataset.validation or test, or add more data",
                code="split-empty",
            )
    return records


def _write_rows(
    writer: StoreWriter, stretches: list[Stretch], records: list[Record], kind: str, first: Stretch, cfg: Dataset
) -> dict[str, Any]:
    """Writes times, poses and controls of all rows; returns what the manifest says of the controls."""
    names = list(geometry.CHANNELS) if kind == "pose" else [*first.names, "dt", "valid"]
    writer.array("times", np.float64)
    writer.array("poses", np.float64, (4, 4))
    writer.array("controls", np.float32, (len(names),))
    for stretch in stretches:
        writer.append("times", stretch.times)
        unknown = np.full((len(stretch.times), 4, 4), np.nan)
        writer.append("poses", unknown if stretch.poses is None else stretch.poses)
    rows = np.zeros((sum(len(stretch.times) for stretch in stretches), len(names)), np.float32)
    for record in records:
        stretch = stretches[record.episode]
        times = stretch.times[record.part]
        if kind == "pose" and stretch.poses is not None:
            rows[record.rows] = controls.pose_controls(stretch.poses[record.part], times, np.array(first.up))
        elif kind == "recorded" and stretch.led is not None:
            rows[record.rows] = controls.recorded_controls(stretch.led[record.part], times)
    writer.append("controls", rows)

    train = np.concatenate([rows[record.rows] for record in records if record.split == "train"])
    valid = train[train[:, -1] == 1]
    if not len(valid):
        raise DataError(
            f"no training step has known {'poses' if kind == 'pose' else 'controls'}; check the table for gaps, and "
            f"its clock against that of the frames (dataset.max_gap={cfg.max_gap:g} s)",
            code="no-controls",
        )
    return {
        "controls": names,
        "control_kind": kind,
        "intents": controls.POSE_INTENTS if kind == "pose" else controls.intents(first.names),
        "statistics": controls.statistics(valid, names, controls.POSE_UNITS if kind == "pose" else ()),
        "num_unknown": sum(int((rows[record.rows][1:, -1] == 0).sum()) for record in records),
    }


def _measure(writer: StoreWriter, records: list[Record], report: Report) -> dict[str, dict[str, float]]:
    """Appends the mean training frame; returns the L1 in [-1, 1] of copying the last frame, and of that mean.

    Sums are whole numbers, so neither depends on the order or the machine.
    """
    frames = writer.written("frames")

    def chunks(record: Record) -> Iterator[np.ndarray]:
        """Each begins with the last frame of the one before it."""
        for start in range(record.start, record.rows.stop - 1, CHUNK):
            yield frames[start : min(start + CHUNK + 1, record.rows.stop)]

    train = [record for record in records if record.split == "train"]
    total, num_frames = np.zeros(frames.shape[1:], np.int64), sum(record.length for record in train)
    for record in train:
        total += frames[record.start]
        for chunk in chunks(record):
            total += chunk[1:].sum(0, dtype=np.int64)
    mean = ((2 * total + num_frames) // (2 * num_frames)).astype(np.uint8)
    writer.array("mean_frame", np.uint8, mean.shape)
    writer.append("mean_frame", mean[None])

    copied, meant, counts = Counter[str](), Counter[str](), Counter[str]()
    done, num_steps = 0, sum(record.length - 1 for record in records)
    for record in records:
        for chunk in chunks(record):
            wide = chunk.astype(np.int16)
            copied[record.split] += int(np.abs(wide[1:] - wide[:-1]).sum(dtype=np.int64))
            meant[record.split] += int(np.abs(wide[1:] - mean.astype(np.int16)).sum(dtype=np.int64))
            counts[record.split] += wide[1:].size
            done += len(chunk) - 1
            report("measuring", done, num_steps)
    return {
        name: {"persistence": copied[name] / num / 127.5, "mean_frame": meant[name] / num / 127.5}
        for name, num in counts.items()
    }


def _features(writer: StoreWriter, records: list[Record], cfg: Dataset, seed: int, report: Report) -> dict[str, Any]:
    divisor = features.divisor_for(cfg.height, divisors(cfg.width, cfg.height))
    rows = np.concatenate([np.arange(r.start, r.rows.stop) for r in records if r.split == "train"])
    return features.train(writer.written(array_of(divisor)), rows, divisor, seed, report)


def _summary(info: dict[str, Any], records: list[Record], num_episodes: int, seconds: float) -> str:
    """What `rung data world` prints: counts, baselines, controls, and everything that was assumed or left out."""
    kind = "moves between poses" if info["control_kind"] == "pose" else "controls as recorded"
    lines = [
        f"{sum(record.length for record in records)} frames of {info['width']}x{info['height']}, "
        f"{num_episodes} episode{'' if num_episodes == 1 else 's'}, {seconds / 60:.1f} min at {info['rate_hz']:.4g} Hz "
        f"(median); {kind}; split by {info['split_by']}"
    ]
    for name in split.SPLITS:
        lengths = [record.length for record in records if record.split == name]
        if lengths:
            base = info["baselines"][name]
            lines.append(
                f"  {name:<10}  {sum(lengths)} frames, {len(lengths)} record{'' if len(lengths) == 1 else 's'} "
                f"(longest: {max(lengths)}); L1 of copying the last frame {base['persistence']:.4f}, of the mean frame "
                f"{base['mean_frame']:.4f}"
            )
    figures, columns = info["statistics"], ("mean", "std", "low", "high", "brisk")
    lines.append("  " + "control".ljust(12) + "".join(column.rjust(11) for column in columns))
    for number, name in enumerate(info["controls"]):
        if name not in figures["constant"]:
            lines.append(f"  {name:<12}" + "".join(f"{figures[column][number] + 0.0:>11.4g}" for column in columns))
        elif name != "valid":
            lines.append(f"  {name:<12}{figures['mean'][number]:>11.4g}  constant")
    if info["num_unknown"]:
        lines.append(f"  {info['num_unknown']} steps have no known control and are marked as not valid")
    if info["dropped"]:
        dropped = [f"{number} {REASONS.get(why, why)}" for why, number in info["dropped"].items()]
        lines.append("left out: " + ", ".join(dropped))
    return "\n".join(lines + [f"note: {note}" for note in info["notes"]])
