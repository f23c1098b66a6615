"""Where the points of a sweep are worked on. A launcher only places commands; point.py does the work.

What becomes of a point lies in the sweep's folder and in its run, so a sweep outlives its launcher, and another may
continue it. `launch` in the sweep file speaks to every launcher alike: `threads` (CPUs of a point), `gpus` (anything
but 0 or an empty list: one GPU for each rank), `mem_gb`. Names that none knows are refused where the file is read; here
it is the values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rung.errors import ConfigError, UserError
from rung.sweep.space import Point, Sweep
from rung.text import one_line

ReportState = Callable[[str, str, str], None]  # key, state, where; state: waiting running stopped finished failed lost

MOST = 1_000_000  # of anything; more is a slip of the keyboard


class Launcher(Protocol):
    def run(self, sweep: Sweep, points: Sequence[Point], report: ReportState) -> None:
        """Starts each point's command, as many at a time as there are places; starts one again that ended with 3 or was
        lost; returns when none is running or waiting. Ctrl-C ends it by KeyboardInterrupt, whose text, if it has one,
        says what becomes of the points."""


def launcher_of(sweep: Sweep, on: str | None) -> Launcher:
    """The launcher that `on` names, or else the sweep file: local, ray, ray://host:port, host:port or slurm."""
    where = on or sweep.launch.get("on") or "local"
    if where == "local":
        from rung.sweep.launch.local import LocalLauncher

        return LocalLauncher.of(sweep)
    if where == "ray" or str(where).startswith("ray://") or re.fullmatch(r"[\w.-]+:\d+", str(where)):
        from rung.sweep.launch.ray import RayLauncher

        return RayLauncher(sweep.launch.get("address") if where == "ray" else str(where))
    if where == "slurm":
        from rung.sweep.launch.slurm import SlurmLauncher

        return SlurmLauncher()
    message = f"{one_line(where)} cannot run a sweep; use local, ray, ray://HOST:PORT or slurm."
    raise UserError(message, code="bad-launcher")


@dataclass(frozen=True)
class Resources:
    """What a point, with all its ranks, takes of its node."""

    cpus: int
    gpus: int
    mem_gb: float | None

    @classmethod
    def of(cls, sweep: Sweep) -> Resources:
        cpus = sweep.ranks * int_option(sweep, "threads", 1)
        mem_gb = sweep.launch.get("mem_gb")
        is_number = isinstance(mem_gb, int | float) and not isinstance(mem_gb, bool)
        if mem_gb is not None and not (is_number and 0 < mem_gb < 1e6):
            raise _bad_option("mem_gb", mem_gb, "a number above 0")
        return cls(cpus, sweep.ranks if sweep.launch.get("gpus") else 0, mem_gb)


def int_option(sweep: Sweep, name: str, default: int, low: int = 1) -> int:
    value = sweep.launch.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MOST:
        raise _bad_option(name, value, f"a whole number from {low} to {MOST}")
    return value


def text_option(sweep: Sweep, name: str) -> str | None:
    """Text of one line: it goes into files in which a line end would begin something else."""
    value = sweep.launch.get(name)
    if value is not None and (not isinstance(value, str) or not value.isprintable() or not value.strip()):
        raise _bad_option(name, value, "a line of text")
    return value


def list_option(sweep: Sweep, name: str) -> list[str]:
    value = sweep.launch.get(name) or []
    if not isinstance(value, list) or not all(isinstance(one, str) and one.isprintable() for one in value):
        raise _bad_option(name, value, "a list of lines of text")
    return value


def dict_option(sweep: Sweep, name: str) -> dict[str, Any]:
    value = sweep.launch.get(name) or {}
    if not isinstance(value, dict) or not all(isinstance(one, str) and one.isprintable() for one in value):
        raise _bad_option(name, value, "keys and values")
    return value


def _bad_option(name: str, value: Any, wanted: str) -> ConfigError:
    shown = repr(one_line(value)) if isinstance(value, str) else one_line(value)
    return ConfigError(f"launch: {name}={shown} must be {wanted}; change it in the sweep file.", code="bad-value")
