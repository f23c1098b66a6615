"""Decides where to go: controls from a seed, the plan of a map, and where the camera has got to. Knows no engine.

The one surprising thing is that the walker does not look where it goes. The way is chosen in the world (through open
ground that it does not know yet) and the view turns on its own whims, so that going forward, back and sideways are
about equally common in the axes of the camera, and still new places are seen all the time.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from rung.recipes.world.walk.plan import Plan, nearest

CONTROLS = ("forward", "strafe", "yaw", "pitch")  # ViZDoom's deltas: ahead, to the right, turn right, look up
GLIDE = 2 / 3  # map units in a step of 2 tics per unit of control, at last: thrust 1/32 a tic, friction 0.90625
CELL = 64.0  # side of a square of ground, in map units; the walker is 32 wide
NEAR = 112.0  # what is nearer is looked away from
RESTS = 1 / 250  # a step
ROOM = np.arange(0.0, 360.0, 22.5)  # ways to choose from


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
        if self.is_resting():
            self.push *= 0.5
            return [float(self.push[0]), float(self.push[1]), 0.0, 0.0], False
        speed = abs(self.speed.step())
        if self.is_stuck(x, y, speed):
            self.give_way(x, y)
        elif not self.tries and self.open_ground(x, y, np.array([self.way]))[0] < self.margin:
            self.choose_way(x, y)
        off = math.radians(self.way - yaw)  # how far the way lies to the left of the view
        self.push += 0.4 * (speed * np.array([math.cos(off), -math.sin(off)]) - self.push)
        turn, is_opening = self.turn.step() + self.shy(x, y, yaw), False
        if self.tries:
            self.tries -= 1
            turn = -1.9 * math.sin(off / 2)
            is_opening = self.tries % 4 == 0 and math.cos(off) > 0.7 and nearest(self.plan.exits, x, y)[1] > 160
        look = self.look.step() + 0.02 * pitch + (0.15 * pitch if abs(pitch) > 10 else 0.0)
        return [float(self.push[0]), float(self.push[1]), turn, look], is_opening

    def is_resting(self) -> bool:
        """Now and then one stands and looks, or a model would never learn that nothing moves when nobody does."""
        if not self.rest and self.rng.random() < RESTS:
            self.rest = int(self.rng.integers(15, 45))
        self.rest = max(0, self.rest - 1)
        return self.rest > 0

    def is_stuck(self, x: float, y: float, speed: float) -> bool:
        """Whether for some steps one has got far less along the way than one should have."""
        ahead_x, ahead_y = self.toward(1.0)
        gain = 0.0 if self.before is None else (x - self.before[0]) * ahead_x + (y - self.before[1]) * ahead_y
        self.before = (x, y)
        self.known[self.cell(x, y)] += 1
        self.patience = min(5, self.patience + (1 if gain > 0.35 * GLIDE * speed else -1))
        return self.patience < 0 and not self.tries

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
        """How far each way goes for somebody with shoulders."""
        around = np.radians(ways[:, None] + np.array([-12.0, 0.0, 12.0]))
        return self.plan.free(x, y, around.reshape(-1)).reshape(around.shape).min(1)

    def shy(self, x: float, y: float, yaw: float) -> float:
        """Turns the view from a wall right before it to the side where one sees further."""
        left, ahead, right = self.plan.free(x, y, np.radians(yaw + np.array([40.0, 0.0, -40.0])))
        return 0.0 if ahead > NEAR else 1.6 * (1 - ahead / NEAR) * math.copysign(1.0, right - left)

    def toward(self, reach: float) -> tuple[float, float]:
        angle = math.radians(self.way)
        return reach * math.cos(angle), reach * math.sin(angle)

    def cell(self, x: float, y: float) -> tuple[int, int]:
        return math.floor(x / CELL), math.floor(y / CELL)
