"""Finds the recordings in what a user points at; each becomes an Episode whose frames are read later.

A folder may be a Donkey Car tub, a KITTI sequence (poses.txt, times.txt and a folder of pictures), pictures or films
with a table, or a folder of such folders. Counts are compared here, before any work: a picture that is missing or a
pose too few is an error, since whatever is paired after it would be off by one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from rung.errors import DataError
from rung.recipes.world.config import Dataset
from rung.recipes.world.sources import images, tables, video
from rung.recipes.world.sources.episode import Episode as Episode
from rung.recipes.world.sources.tables import Table, read_table
from rung.recipes.world.sources.tub import is_tub, read_tub

_LOOKED_FOR = (
    "looked for a table (frames.jsonl, .json or .csv) beside pictures or a film, a Donkey Car tub (manifest.json and "
    "catalog_*.catalog, or record_*.json), and KITTI's poses.txt, times.txt and image_2"
)


def find_episodes(source: Path, cfg: Dataset) -> list[Episode]:
    """All recordings under `source`, in the order of their names."""
    try:
        if not source.exists():
            raise DataError(f"there is no {source}; pass --from a folder with frames, a film or a table")
        episodes = _from_file(source, cfg) if source.is_file() else _from_folders(source, cfg)
    except OSError as error:
        raise DataError(f"cannot read {error.filename or source}: {error.strerror}; check who may read it") from error
    if not episodes:
        raise DataError(f"nothing to learn from in {source}: {_LOOKED_FOR}")
    return episodes


def _from_folders(source: Path, cfg: Dataset) -> list[Episode]:
    episodes = _from_folder(source, cfg)
    if episodes is not None:
        return episodes
    children = [child for child in _sorted(source.iterdir()) if child.is_dir()]
    return [episode for child in children for episode in _from_folder(child, cfg, child.name) or []]


def _from_file(path: Path, cfg: Dataset) -> list[Episode]:
    suffix = path.suffix.lower()
    if suffix in video.SUFFIXES:
        return [_film(path, _tables(path.parent), len(_films(path.parent)) == 1, cfg)]
    if suffix in tables.SUFFIXES:
        return _pictures(read_table(path), path.parent, cfg)
    raise DataError(
        f"{path} is neither a film ({', '.join(video.SUFFIXES)}) nor a table ({', '.join(tables.SUFFIXES)}); "
        "pass --from the folder that it lies in"
    )


def _from_folder(folder: Path, cfg: Dataset, within: str = "") -> list[Episode] | None:
    """None where the folder itself is no recording; `within` is its name where it is one of several."""
    if is_tub(folder):
        table, num_deleted = read_tub(folder)
        episodes = _pictures(table, folder, cfg, within)
        episodes[0].dropped = {"deleted by the driver": num_deleted} if num_deleted else {}
        for episode, (_, rows) in zip(episodes, table.groups()):
            episode.breaks = np.flatnonzero(np.diff(table.numbers("index")[rows]) != 1) + 1
        return episodes
    if (folder / "poses.txt").is_file():
        return [_kitti(folder)]
    found = _tables(folder)
    films = _films(folder)
    named = [path for path in found if path.stem == "frames"]
    if films and not named:
        return [_film(path, found, len(films) == 1, cfg, within) for path in films]
    if len(found) > 1 and not named:
        names = ", ".join(path.name for path in found)
        raise DataError(f"{folder} has several tables ({names}); pass --from the one that lists the frames")
    return _pictures(read_table((named or found)[0]), folder, cfg, within) if found else None


# Pictures


def _pictures(table: Table, folder: Path, cfg: Dataset, within: str = "") -> list[Episode]:
    paths = _listed(table, folder)
    times = table.times()
    if times is None:
        times = table.counted(np.arange(len(table.rows), dtype=np.float64), "the table, which has no times,")
    poses = table.poses(cfg.axes)
    controls, names = table.controls()
    return [
        Episode(
            label, times[rows], images.ImageFiles([paths[row] for row in rows]),
            poses=None if poses is None else poses[rows], up=(0, -1, 0) if poses is None else table.up(cfg.axes),
            controls=None if controls is None else controls[rows], control_names=names, notes=table.notes,
        )
        for label, rows in table.groups(within)
    ]  # fmt: skip


def _listed(table: Table, folder: Path) -> list[Path]:
    """The picture of each row: by name where a column has names, else by order."""
    column = table.find([name for name in tables.IMAGE if any(tables.is_name(row.get(name)) for row in table.rows)])
    if column is None:
        paths = _image_files(folder)
        if len(paths) != len(table.rows):
            raise DataError(
                f"{table.path} has {len(table.rows)} rows and names no pictures, {folder} holds {len(paths)} pictures; "
                "the counts must agree, or a column `image` must name them"
            )
        return paths
    unnamed = [number for number, row in enumerate(table.rows, 1) if not isinstance(row.get(column), str)]
    if unnamed:
        raise DataError(
            f"{table.path}, row {unnamed[0]} of {len(table.rows)} names no picture in {column}; mend the table"
        )
    there = {place: set(os.listdir(place)) for place in {folder, folder / "images"} if place.is_dir()}
    paths = [_where(folder, str(row[column]), there) for row in table.rows]
    missing = [path for path in paths if path.name not in _names(path.parent, there)]
    if missing:
        raise DataError(
            f"{table.path} lists {len(paths)} pictures, {len(paths) - len(missing)} are there; the first that is "
            f"missing is {missing[0]}"
        )
    return paths


def _where(folder: Path, name: str, there: dict[Path, set[str]]) -> Path:
    """A name is a path from the folder, or lies in its images/, as a tub's do."""
    path = folder / name
    is_bare = path.parent == folder and name not in _names(folder, there)
    return folder / "images" / name if is_bare and name in there.get(folder / "images", ()) else path


def _names(folder: Path, there: dict[Path, set[str]]) -> set[str]:
    """What a folder holds; asked once per folder, since a disk far away takes long to say of each file that it is."""
    if folder not in there:
        there[folder] = set(os.listdir(folder)) if folder.is_dir() else set()
    return there[folder]


def _image_files(folder: Path, first: Sequence[str] = ("images", "frames")) -> list[Path]:
    """The pictures of the folder, or of the first of its folders that has some, by the numbers in their names."""
    others = [child for child in _sorted(folder.iterdir()) if child.is_dir()]
    for place in [folder, *(folder / name for name in first), *others]:
        found = (
            [path for path in _sorted(place.iterdir()) if path.suffix.lower() in images.SUFFIXES]
            if place.is_dir()
            else []
        )
        if found:
            return found
    return []


def _kitti(folder: Path) -> Episode:
    poses, paths = (
        _numbers(folder / "poses.txt", 12),
        _image_files(folder, ("image_2", "image_3", "image_0", "image_1")),
    )
    times = _numbers(folder / "times.txt", 1)[:, 0]
    if not np.isfinite(times).all():
        line = int(np.flatnonzero(~np.isfinite(times))[0])
        raise DataError(f"{folder / 'times.txt'}, line {line + 1} has the time {times[line]}; every frame needs one")
    if not len(poses) == len(times) == len(paths) > 0:
        raise DataError(
            f"{folder} has {len(paths)} pictures, {len(poses)} lines in poses.txt and {len(times)} in times.txt; "
            "the counts must agree"
        )
    exact = tables.read_poses(poses, "opencv", str(folder / "poses.txt"))
    return Episode(folder.name, times, images.ImageFiles(paths), poses=exact, up=(0.0, -1.0, 0.0))


def _numbers(path: Path, num_columns: int) -> np.ndarray:
    try:
        lines = [line.split() for line in path.read_text("utf-8").splitlines() if line.strip()]
        values = [[float(word) for word in line] for line in lines]
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path}: {error}; a KITTI sequence has poses.txt, times.txt and pictures"
        ) from error
    for number, line in enumerate(values, 1):
        if len(line) != num_columns:
            raise DataError(f"{path}, line {number} has {len(line)} numbers, not {num_columns}; mend the file")
    return np.array(values, np.float64).reshape(len(values), num_columns)


# Films


def _film(path: Path, found: list[Path], is_alone: bool, cfg: Dataset, within: str = "") -> Episode:
    """With the table of its own name; a film alone in its folder, also with the only table there."""
    beside = [table for table in found if table.stem == path.stem] or (found if is_alone and len(found) == 1 else [])
    if not beside:
        raise DataError(
            f"{path} has no table of poses or controls beside it; put {path.stem}.jsonl or {path.stem}.csv there, with "
            "a column t (seconds on the film's clock) and a pose or controls"
        )
    table, film = read_table(beside[0]), video.Film(path)
    times = table.times(film.times)
    if times is None and len(table.rows) != len(film):
        raise DataError(
            f"{table.path} has {len(table.rows)} rows and no times, {path} has {len(film)} frames; give the table a "
            "column t, or one row per frame"
        )
    if times is not None:
        times = _on_the_films_clock(times, film, table)
    poses = table.poses(cfg.axes)
    controls, names = table.controls()
    return Episode(
        tables.labelled(path.stem, within), film.times, film, poses=poses, pose_times=times,
        up=(0, -1, 0) if poses is None else table.up(cfg.axes),
        controls=controls, control_times=times, control_names=names, notes=table.notes,
    )  # fmt: skip


def _on_the_films_clock(times: np.ndarray, film: video.Film, table: Table) -> np.ndarray:
    """Films count from 0, sensors often from 1970 or from when the device was switched on."""
    if times.min() <= film.times[-1] and times.max() >= film.times[0]:
        return times
    shift = times.min() - film.times[0]
    table.notes.append(
        f"the times of {table.path.name} and {film.path.name} do not overlap: both are taken to begin at the same "
        f"moment (a shift of {shift:.6f} s)"
    )
    return times - shift


def _films(folder: Path) -> list[Path]:
    return [path for path in _sorted(folder.iterdir()) if path.suffix.lower() in video.SUFFIXES]


def _tables(folder: Path) -> list[Path]:
    return [path for path in _sorted(folder.iterdir()) if path.suffix.lower() in tables.SUFFIXES and path.is_file()]


def _sorted(paths: Iterable[Path]) -> list[Path]:
    """By name, numbers as numbers: frame_2 comes before frame_10; hidden files left out."""
    shown = [path for path in paths if not path.name.startswith(".")]
    return sorted(shown, key=lambda p: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", p.name)])
