"""Where the points of a sweep are worked on. A launcher only places commands; point.py does the work.

What becomes of a point lies in the sweep's folder and in its run, so a sweep outlives its launcher, and may be gone on
with by another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rung.errors import UserError
from rung.sweep.space import Point, Sweep
from rung.text import one_line

Told = Callable[[str, str, str], None]  # key, state, where; state: waiting running stopped finished failed lost
NAMES = ("local", "ray", "slurm")


class Launcher(Protocol):
    def run(self, sweep: Sweep, points: Sequence[Point], told: Told) -> None:
        """Starts each point's command, as many at a time as there are places; starts one again that ended with 3 or was
        lost; returns when none is going on or waiting. Ctrl-C ends it by KeyboardInterrupt, whose text, if it has one,
        says what becomes of the points."""


def launcher_of(sweep: Sweep, on: str | None) -> Launcher:
    """The launcher that `on` names, or else the sweep file: local, ray, ray://host:port, host:port or slurm."""
    where = on or sweep.launch.get("on") or "local"
    made: Any
    if where == "local":
        from rung.sweep.launch.local import Local

        made = Local.of(sweep)
    elif where == "ray" or str(where).startswith("ray://") or re.fullmatch(r"[\w.-]+:\d+", str(where)):
        from rung.sweep.launch.ray import OnRay

        made = OnRay(sweep.launch.get("address") if where == "ray" else str(where))
    elif where == "slurm":
        from rung.sweep.launch.slurm import OnSlurm

        made = OnSlurm()
    else:
        raise UserError(f"{one_line(where)} is no place to run a sweep on; use local, ray, ray://HOST:PORT or slurm.")
    found: Launcher = made
    return found
