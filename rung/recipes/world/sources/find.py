"""Finds the recordings in what a user points at; each becomes an Episode whose frames are read later.

A folder may be a Donkey Car tub, a KITTI sequence (poses.txt, times.txt and a folder of pictures), pictures or films
with a table, or a folder of such folders. Counts are compared here, before any work: a picture that is missing or a
pose too few is an error, since whatever is paired after it would be off by one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from rung import parse
from rung.errors import DataError
from rung.recipes.world.config import Dataset
from rung.recipes.world.sources import tables
from rung.recipes.world.sources.episode import Episode
from rung.recipes.world.sources.frames import FILMS, IMAGES, Film, ImageFiles
from rung.recipes.world.sources.tables import FrameTable, read_table


def find_episodes(source: Path, cfg: Dataset) -> list[Episode]:
    """All recordings under `source`, in the order of their names."""
    try:
        if not source.exists():
            raise DataError(
                f"{source} does not exist; pass --from a folder with frames, a film or a table", code="no-file"
            )
        if source.is_file():
            return _from_file(source, cfg)
        episodes = _from_folder(source, cfg)
        if episodes is None:
            children = [child for child in _sorted(source.iterdir()) if child.is_dir()]
            episodes = [episode for child in children for episode in _from_folder(child, cfg, child.name) or []]
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename or source}: {error.strerror}; check its permissions", code="cannot-read"
        ) from error
    if not episodes:
        raise DataError(
            f"nothing to learn from in {source}: looked for a table (frames.jsonl, .json or .csv) beside pictures or a "
            "film, a Donkey Car tub (manifest.json and catalog_*.catalog, or record_*.json), and KITTI's poses.txt, "
            "times.txt and image_2",
            code="no-data",
        )
    return episodes


def _from_file(path: Path, cfg: Dataset) -> list[Episode]:
    suffix = path.suffix.lower()
    if suffix in FILMS:
        return [_film(path, cfg)]
    if suffix in tables.SUFFIXES:
        return _pictures(read_table(path), path.parent, cfg)
    raise DataError(
        f"{path} is neither a film ({', '.join(FILMS)}) nor a table ({', '.join(tables.SUFFIXES)}); pass --from the "
        "folder it is in",
        code="not-supported",
    )


def _from_folder(folder: Path, cfg: Dataset, within: str = "") -> list[Episode] | None:
    """None where the folder itself is no recording; `within` is its name where it is one of several."""
    if tables.is_tub(folder):
        table, num_deleted = tables.read_tub(folder)
        episodes = _pictures(table, folder, cfg, within)
        episodes[0].dropped = {"deleted by the driver": num_deleted} if num_deleted else {}
        for episode, (_, rows) in zip(episodes, table.groups()):
            episode.breaks = np.flatnonzero(np.diff(table.numbers("index")[rows]) != 1) + 1
        return episodes
    if (folder / "poses.txt").is_file():
        return [_kitti(folder)]
    found, films = _tables(folder), _with_suffix(folder, FILMS)
    named = [path for path in found if path.stem == "frames"]
    if films and not named:
        return [_film(path, cfg, within) for path in films]
    if len(found) > 1 and not named:
        names = ", ".join(path.name for path in found)
        raise DataError(
            f"{folder} has several tables ({names}); pass --from the one that lists the frames", code="too-many"
        )
    return _pictures(read_table((named or found)[0]), folder, cfg, within) if found else None


def _pictures(table: FrameTable, folder: Path, cfg: Dataset, within: str = "") -> list[Episode]:
    paths = _listed(table, folder)
    times = table.times()
    if times is None:
        times = table.counted(np.arange(len(table.rows), dtype=np.float64), "the table, which has no times,")
    poses, up = table.poses(cfg.axes)
    controls, names = table.controls()
    return [
        Episode(
            label, times[rows], ImageFiles([paths[row] for row in rows]), poses=None if poses is None else poses[rows],
            up=up, controls=None if controls is None else controls[rows], control_names=names, notes=table.notes,
        )
        for label, rows in table.groups(within)
    ]  # fmt: skip


def _listed(table: FrameTable, folder: Path) -> list[Path]:
    """The picture of each row: by name where a column has names, else by order."""
    column = table.find([name for name in tables.IMAGE if any(tables.is_name(row.get(name)) for row in table.rows)])
    if column is None:
        paths = _image_files(folder, ("images", "frames"))
        if len(paths) != len(table.rows):
            raise DataError(
                f"{table.path} has {len(table.rows)} rows and names no pictures, {folder} has {len(paths)} pictures; "
                "the counts must agree, or a column `image` must name them",
                code="count-mismatch",
            )
        return paths

    @cache
    def names_in(place: Path) -> set[str]:  # asked once per folder: a disk far away is slow to look for each file
        return set(os.listdir(place)) if place.is_dir() else set()

    paths = []
    for number, row in enumerate(table.rows, 1):
        name = row.get(column)
        if not isinstance(name, str):
            raise tables.bad_table(f"{table.path}, row {number} of {len(table.rows)}", f"no picture in {column}")
        path = folder / name
        # A name is a path from the folder, or lies in its images/, as a tub's do.
        if path.parent == folder and name not in names_in(folder) and name in names_in(folder / "images"):
            path = folder / "images" / name
        paths.append(path)
    missing = [path for path in paths if path.name not in names_in(path.parent)]
    if missing:
        raise DataError(
            f"{table.path} lists {len(paths)} pictures, but {len(missing)} of them do not exist; the first is "
            f"{missing[0]}",
            code="no-file",
        )
    return paths


def _image_files(folder: Path, first: Sequence[str]) -> list[Path]:
    """The pictures of the folder, or of the first of its folders that has some, by the numbers in their names."""
    others = [child for child in _sorted(folder.iterdir()) if child.is_dir()]
    for place in [folder, *(folder / name for name in first), *others]:
        if place.is_dir() and (found := _with_suffix(place, IMAGES)):
            return found
    return []


def _kitti(folder: Path) -> Episode:
    poses, times = _numbers(folder / "poses.txt", 12), _numbers(folder / "times.txt", 1)[:, 0]
    paths = _image_files(folder, ("image_2", "image_3", "image_0", "image_1"))
    if not np.isfinite(times).all():
        line = int(np.flatnonzero(~np.isfinite(times))[0])
        raise tables.bad_table(f"{folder / 'times.txt'}, line {line + 1}", f"the time is {times[line]}")
    if not len(poses) == len(times) == len(paths) > 0:
        raise DataError(
            f"{folder} has {len(paths)} pictures, {len(poses)} lines in poses.txt and {len(times)} in times.txt; "
            "the counts must agree",
            code="count-mismatch",
        )
    exact = tables.read_poses(poses, "opencv", str(folder / "poses.txt"))
    return Episode(folder.name, times, ImageFiles(paths), poses=exact)


def _numbers(path: Path, num_columns: int) -> np.ndarray:
    try:
        lines = parse.text(parse.read_bytes(path)).splitlines()
        values = [[float(word) for word in line.split()] for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise tables.bad_table(path, f"{error}; a KITTI sequence has poses.txt, times.txt and pictures") from error
    for number, line in enumerate(values, 1):
        if len(line) != num_columns:
            raise tables.bad_table(f"{path}, line {number}", f"{len(line)} numbers, not {num_columns}")
    return np.array(values, np.float64).reshape(len(values), num_columns)


def _film(path: Path, cfg: Dataset, within: str = "") -> Episode:
    """With the table of its own name; a film alone in its folder, also with the only table there."""
    found = _tables(path.parent)
    beside = [table for table in found if table.stem == path.stem]
    if not beside and len(found) == len(_with_suffix(path.parent, FILMS)) == 1:
        beside = found
    if not beside:
        raise DataError(
            f"{path} has no table of poses or controls beside it; put {path.stem}.jsonl or {path.stem}.csv there, with "
            "a column t (seconds on the film's clock) and a pose or controls",
            code="no-table",
        )
    table, film = read_table(beside[0]), Film(path)
    times = table.times(film.times)
    if times is None and len(table.rows) != len(film.times):
        raise DataError(
            f"{table.path} has {len(table.rows)} rows and no times, {path} has {len(film.times)} frames; give the "
            "table a column t, or one row per frame",
            code="count-mismatch",
        )
    if times is not None and (times.min() > film.times[-1] or times.max() < film.times[0]):
        # Films count from 0, sensors often from 1970 or from when the device was switched on.
        shift = times.min() - film.times[0]
        times = times - shift
        table.notes.append(
            f"the times of {table.path.name} and {path.name} do not overlap: both are taken to begin at the same "
            f"moment (a shift of {shift:.6f} s)"
        )
    poses, up = table.poses(cfg.axes)
    controls, names = table.controls()
    return Episode(
        tables.labelled(path.stem, within), film.times, film, poses=poses, pose_times=times, up=up,
        controls=controls, control_times=times, control_names=names, notes=table.notes,
    )  # fmt: skip


def _with_suffix(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files with one of these suffixes; a pipe of such a name would keep its reader waiting for ever."""
    return [path for path in _sorted(folder.iterdir()) if path.suffix.lower() in suffixes and os.path.isfile(path)]


def _tables(folder: Path) -> list[Path]:
    return _with_suffix(folder, tables.SUFFIXES)


def _sorted(paths: Iterable[Path]) -> list[Path]:
    """By name, numbers as numbers: frame_2 comes before frame_10; hidden files left out."""
    shown = [path for path in paths if not path.name.startswith(".")]
    return sorted(shown, key=lambda p: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", p.name)])
