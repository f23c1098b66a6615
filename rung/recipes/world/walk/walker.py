"""Decides where to walk: controls from a seed, the plan of a map and the position of the camera. Knows no engine.

The walker does not look where it goes: it heads for open ground it has not seen while the view turns at random, so that
moving forward, back and sideways are about equally common and new places keep appearing. The plan is read from the WAD
(Doom's original format) and is that before anything has moved: what opens or sinks later is found out by walking there.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rung.errors import DataError

CONTROLS = ("forward", "strafe", "yaw", "pitch")  # ViZDoom's deltas: ahead, to the right, turn right, look up
GLIDE = 2 / 3  # map units in a step of 2 tics per unit of control, at last: thrust 1/32 a tic, friction 0.90625
CELL = 64.0  # side of a square of ground, in map units; the walker is 32 wide
NEAR = 112.0  # what is nearer is looked away from
RESTS = 1 / 250  # a step
ROOM = np.arange(0.0, 360.0, 22.5)  # ways to choose from


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

    walls: np.ndarray  # cannot be crossed, or better not: they end the map, or lead elsewhere
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
    with wad.open("rb") as file:
        kind, count, place = struct.unpack("<4sii", file.read(12))
        file.seek(place)
        entries = [struct.unpack("<ii8s", file.read(16)) for _ in range(count if kind in (b"IWAD", b"PWAD") else 0)]
        names = [entry[2].rstrip(b"\0").decode("ascii", "replace") for entry in entries]
        if name.upper() not in names:
            raise DataError(f"{wad.name} has no map {name}; reinstall vizdoom==1.3.2", code="no-map")
        # The lumps of a map follow an empty one with its name.
        lumps, first = {}, names.index(name.upper()) + 1
        for (offset, size, _), lump in zip(entries[first : first + 10], names[first : first + 10]):
            file.seek(offset)
            lumps[lump] = file.read(size)
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


class Whim:
    """A number that glides towards a target, and takes another target every now and then."""

    def __init__(self, rng: np.random.Generator, low: float, high: float, rest: float, ease: float) -> None:
        """Targets have a size in [low, high] and either sign; a share `rest` of them is 0."""
        self.rng, self.low, self.high, self.rest, self.ease = rng, low, high, rest, ease
        self.value, self.target, self.left = 0.0, 0.0, 0

    def step(self) -> float:
        if self.left == 0:
            self.left = int(self.rng.integers(8, 40))
            size, sign = self.rng.uniform(self.low, self.high), self.rng.choice((-1.0, 1.0))
            self.target = 0.0 if self.rng.random() < self.rest else size * sign
        self.left -= 1
        self.value += self.ease * (self.target - self.value)
        return self.value


class Walker:
    """One walk. Angles are in degrees, to the left of +x, as ViZDoom has them; its pitch is positive downwards."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.rng, self.plan = np.random.default_rng(seed), plan
        self.speed = Whim(self.rng, 10, 26, rest=0.06, ease=0.3)
        self.turn = Whim(self.rng, 0.2, 1.8, rest=0.25, ease=0.2)  # degrees a tic
        self.look = Whim(self.rng, 0.1, 0.7, rest=0.3, ease=0.2)
        self.known: Counter[tuple[int, int]] = Counter()  # how often each square was entered, or found closed
        self.hope = np.full(len(plan.doors), 3)  # how often each door is still worth a try
        self.start()

    def start(self) -> None:
        """The body has been put somewhere else."""
        self.way, self.push = 0.0, np.zeros(2)  # where to go in the world; the controls of walking, smoothed
        self.patience, self.tries = 0, 0  # steps before giving up the way; steps left to open a door
        self.margin = 0.0  # how near to a wall to turn off; 0 walks into it
        self.rest = 0  # steps left to stand still
        self.before: tuple[float, float] | None = None

    def step(self, pose: np.ndarray) -> tuple[list[float], bool]:
        """The controls for this pose (x, y, z, yaw, pitch, roll), and whether to try and open what is in front."""
        x, y, _, yaw, pitch, _ = map(float, pose)
        # Now and then it stands and looks, or a model would never learn that nothing moves when nobody does.
        if not self.rest and self.rng.random() < RESTS:
            self.rest = int(self.rng.integers(15, 45))
        self.rest = max(0, self.rest - 1)
        if self.rest:
            self.push *= 0.5
            return [float(self.push[0]), float(self.push[1]), 0.0, 0.0], False

        # It is stuck when for some steps it has got far less along the way than it should have.
        speed = abs(self.speed.step())
        ahead_x, ahead_y = self.toward(1.0)
        gain = 0.0 if self.before is None else (x - self.before[0]) * ahead_x + (y - self.before[1]) * ahead_y
        self.before = (x, y)
        self.known[self.cell(x, y)] += 1
        self.patience = min(5, self.patience + (1 if gain > 0.35 * GLIDE * speed else -1))
        if self.patience < 0 and not self.tries:
            self.give_way(x, y)
        elif not self.tries and self.open_ground(x, y, np.array([self.way]))[0] < self.margin:
            self.choose_way(x, y)

        off = math.radians(self.way - yaw)  # how far the way lies to the left of the view
        self.push += 0.4 * (speed * np.array([math.cos(off), -math.sin(off)]) - self.push)
        turn, is_opening = self.turn.step(), False
        left, ahead, right = self.plan.free(x, y, np.radians(yaw + np.array([40.0, 0.0, -40.0])))
        if ahead <= NEAR:  # the view turns from a wall right before it to the side where one sees further
            turn += 1.6 * (1 - ahead / NEAR) * math.copysign(1.0, right - left)
        if self.tries:
            self.tries -= 1
            turn = -1.9 * math.sin(off / 2)
            is_opening = self.tries % 4 == 0 and math.cos(off) > 0.7 and nearest(self.plan.exits, x, y)[1] > 160
        look = self.look.step() + 0.02 * pitch + (0.15 * pitch if abs(pitch) > 10 else 0.0)
        return [float(self.push[0]), float(self.push[1]), turn, look], is_opening

    def give_way(self, x: float, y: float) -> None:
        """A door that may open is worth a wait; anything else is remembered as closed, and left."""
        door, distance = nearest(self.plan.doors, x, y)
        if distance < 80 and self.hope[door]:
            self.hope[door] -= 1
            self.tries, self.patience = 28, 8
            x1, y1, x2, y2 = self.plan.doors[door]
            self.way = math.degrees(math.atan2((y1 + y2) / 2 - y, (x1 + x2) / 2 - x))
        else:
            step_x, step_y = self.toward(0.75 * CELL)
            self.known[self.cell(x + step_x, y + step_y)] += 20
            self.choose_way(x, y)

    def choose_way(self, x: float, y: float) -> None:
        """The way with the most open ground and the least known, with some chance in it."""
        ways = ROOM + self.rng.uniform(0, 360)
        ground = self.open_ground(x, y, ways)
        costs = self.rng.exponential(4.0, len(ways)) - 20 * np.minimum(ground, 400) / 400
        for number, self.way in enumerate(ways):
            for reach in (0.75, 1.5, 2.5, 4.0, 6.0):
                step_x, step_y = self.toward(reach * CELL)
                costs[number] += self.known[self.cell(x + step_x, y + step_y)] / reach
        best = int(costs.argmin())
        self.way, self.patience = float(ways[best]), 8  # steps to gain speed
        self.margin = min(self.rng.uniform(0.0, 80.0), ground[best] / 2)

    def open_ground(self, x: float, y: float, ways: np.ndarray) -> np.ndarray:
        """How far each way is free for a body of some width."""
        around = np.radians(ways[:, None] + np.array([-12.0, 0.0, 12.0]))
        return self.plan.free(x, y, around.reshape(-1)).reshape(around.shape).min(1)

    def toward(self, reach: float) -> tuple[float, float]:
        angle = math.radians(self.way)
        return reach * math.cos(angle), reach * math.sin(angle)

    def cell(self, x: float, y: float) -> tuple[int, int]:
        return math.floor(x / CELL), math.floor(y / CELL)
