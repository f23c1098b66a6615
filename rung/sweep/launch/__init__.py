"""Where the points of a sweep are worked on. A launcher only places commands; point.py does the work.

What becomes of a point lies in the sweep's folder and in its run, so a sweep outlives its launcher, and another may
continue it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rung.errors import UserError
from rung.sweep.space import Point, Sweep
from rung.text import one_line

ReportState = Callable[[str, str, str], None]  # key, state, where; state: waiting running stopped finished failed lost


class Launcher(Protocol):
    def run(self, sweep: Sweep, points: Sequence[Point], report: ReportState) -> None:
        """Starts each point's command, as many at a time as there are places; starts one again that ended with 3 or was
        lost; returns when none is running or waiting. Ctrl-C ends it by KeyboardInterrupt, whose text, if it has one,
        says what becomes of the points."""


def launcher_of(sweep: Sweep, on: str | None) -> Launcher:
    """The launcher that `on` names, or else the sweep file: local, ray, ray://host:port, host:port or slurm."""
    where = on or sweep.launch.get("on") or "local"
    made: Any
    if where == "local":
        from rung.sweep.launch.local import LocalLauncher

        made = LocalLauncher.of(sweep)
    elif where == "ray" or str(where).startswith("ray://") or re.fullmatch(r"[\w.-]+:\d+", str(where)):
        from rung.sweep.launch.ray import RayLauncher

        made = RayLauncher(sweep.launch.get("address") if where == "ray" else str(where))
    elif where == "slurm":
        from rung.sweep.launch.slurm import SlurmLauncher

        made = SlurmLauncher()
    else:
        message = f"{one_line(where)} cannot run a sweep; use local, ray, ray://HOST:PORT or slurm."
        raise UserError(message, code="bad-launcher")
    found: Launcher = made
    return found
