"""What a point needs of the node that it is placed on, read out of the sweep file's `launch` and checked.

The same words serve every engine: `threads` (CPUs of a point), `gpus` (anything but 0 or an empty list: one GPU for
each rank), `mem_gb`. Names that no engine knows are refused where the sweep file is read; here it is the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rung.errors import ConfigError
from rung.sweep.space import Sweep
from rung.text import one_line

MOST = 1_000_000  # of anything; more is a slip of the keyboard


@dataclass(frozen=True)
class Needs:
    """Of one point, with all its ranks."""

    cpus: int
    gpus: int
    mem_gb: float | None

    @classmethod
    def of(cls, sweep: Sweep) -> Needs:
        gpus = sweep.ranks if sweep.launch.get("gpus") else 0
        return cls(sweep.ranks * whole(sweep, "threads", 1), gpus, amount(sweep, "mem_gb"))


def whole(sweep: Sweep, name: str, default: int, low: int = 1) -> int:
    value = sweep.launch.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MOST:
        raise _wrong(name, value, f"a whole number from {low} to {MOST}")
    return value


def amount(sweep: Sweep, name: str) -> float | None:
    value = sweep.launch.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6):
        raise _wrong(name, value, "a number above 0")
    return value


def line(sweep: Sweep, name: str) -> str | None:
    """Text of one line: it goes into files in which a line end would begin something else."""
    value = sweep.launch.get(name)
    if value is not None and (not isinstance(value, str) or not value.isprintable() or not value.strip()):
        raise _wrong(name, value, "a line of text")
    return value


def lines(sweep: Sweep, name: str) -> list[str]:
    value = sweep.launch.get(name) or []
    if not isinstance(value, list) or not all(isinstance(one, str) and one.isprintable() for one in value):
        raise _wrong(name, value, "a list of lines of text")
    return value


def table(sweep: Sweep, name: str) -> dict[str, Any]:
    value = sweep.launch.get(name) or {}
    if not isinstance(value, dict) or not all(isinstance(one, str) and one.isprintable() for one in value):
        raise _wrong(name, value, "keys and values")
    return value


def _wrong(name: str, value: Any, wanted: str) -> ConfigError:
    shown = repr(one_line(value)) if isinstance(value, str) else one_line(value)
    return ConfigError(f"launch: {name}={shown} must be {wanted}; change it in the sweep file.", code="bad-value")
