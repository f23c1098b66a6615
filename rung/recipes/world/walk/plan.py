"""The plan of a Freedoom map, read from its WAD: what a walker may bump into, open, or had better not touch.

It is the plan before anything has moved: what opens or sinks later is found out by walking there. Maps must be in the
original format of Doom, as all of Freedoom's are.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rung.errors import DataError

_LINE = np.dtype([("corners", "<u2", 2), ("flags", "<u2"), ("special", "<u2"), ("tag", "<u2"), ("sides", "<u2", 2)])
_SIDE = np.dtype([("textures", "V28"), ("sector", "<u2")])
_SECTOR = np.dtype([("floor", "<i2"), ("ceiling", "<i2"), ("rest", "V22")])
_BLOCKS, _NO_SIDE = 1, 0xFFFF
_CLIMB, _HEAD = 24, 56  # map units: the highest step, the lowest passage
# Specials of the original engine
_DOORS = (1, 26, 27, 28, 29, 31, 32, 33, 34, 42, 46, 61, 63, 103, 111, 112, 114, 115, 117, 118, 62, 88, 120, 123)
_EXITS = (11, 51, 52, 124)
_TELEPORTS = (39, 97)
FAR = 1024.0  # map units; what lies beyond is all the same


class Plan(NamedTuple):
    """Lines are (N, 4): x and y of both ends, in map units."""

    walls: np.ndarray  # cannot be crossed, or better not: they end the map, or bring one elsewhere
    doors: np.ndarray  # can be opened, or bring a lift
    exits: np.ndarray

    def free(self, x: float, y: float, angles: np.ndarray) -> np.ndarray:
        """How far one sees from a point in these directions (radians), before the first wall."""
        ray_x, ray_y = np.cos(angles)[:, None], np.sin(angles)[:, None]
        to_x, to_y = self.walls[:, 0] - x, self.walls[:, 1] - y
        along_x, along_y = self.walls[:, 2] - self.walls[:, 0], self.walls[:, 3] - self.walls[:, 1]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            cross = ray_x * along_y - ray_y * along_x
            reach = (to_x * along_y - to_y * along_x) / cross
            share = (to_x * ray_y - to_y * ray_x) / cross
        hit = (reach > 0) & (share >= 0) & (share <= 1)
        return np.where(hit, reach, FAR).min(1, initial=FAR)


def nearest(lines: np.ndarray, x: float, y: float) -> tuple[int, float]:
    """The line whose middle is nearest to a point, and its distance; -1 where there are none."""
    if not len(lines):
        return -1, FAR
    distance = np.hypot(lines[:, 0] + lines[:, 2] - 2 * x, lines[:, 1] + lines[:, 3] - 2 * y) / 2
    return int(distance.argmin()), float(distance.min())


def read_plan(wad: Path, name: str) -> Plan:
    lumps = _lumps_after(wad, name)
    lines, sides = np.frombuffer(lumps["LINEDEFS"], _LINE), np.frombuffer(lumps["SIDEDEFS"], _SIDE)
    corners = np.frombuffer(lumps["VERTEXES"], "<i2").reshape(-1, 2).astype(np.float64)
    ends = corners[lines["corners"]].reshape(-1, 4)
    has_two_sides = (lines["sides"] != _NO_SIDE).all(1)
    side = sides[np.where(has_two_sides[:, None], lines["sides"], 0)]
    sector = np.frombuffer(lumps["SECTORS"], _SECTOR)[side["sector"]]
    floor, ceiling = sector["floor"].astype(int), sector["ceiling"].astype(int)
    is_step = np.ptp(floor, axis=1) > _CLIMB  # downwards too: where one falls one is often caught
    is_low = ceiling.min(1) - floor.max(1) < _HEAD
    is_door, is_exit = np.isin(lines["special"], _DOORS), np.isin(lines["special"], _EXITS)
    is_closed = ~has_two_sides | (lines["flags"] & _BLOCKS != 0) | np.isin(lines["special"], _TELEPORTS) | is_exit
    return Plan(ends[is_closed | ((is_step | is_low) & ~is_door)], ends[is_door], ends[is_exit])


def _lumps_after(wad: Path, name: str) -> dict[str, bytes]:
    """The lumps of one map: a WAD's directory has them after an empty one with the name of the map."""
    with wad.open("rb") as file:
        kind, count, place = struct.unpack("<4sii", file.read(12))
        file.seek(place)
        entries = [struct.unpack("<ii8s", file.read(16)) for _ in range(count if kind in (b"IWAD", b"PWAD") else 0)]
        names = [entry[2].rstrip(b"\0").decode("ascii", "replace") for entry in entries]
        if name.upper() not in names:
            raise DataError(f"{wad.name} has no map {name}; reinstall vizdoom==1.3.2")
        lumps = {}
        first = names.index(name.upper()) + 1
        for (offset, size, _), lump in zip(entries[first : first + 10], names[first : first + 10]):
            file.seek(offset)
            lumps[lump] = file.read(size)
    return lumps
