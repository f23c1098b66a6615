"""Quantities with units: budgets and cadences as users write them, and numbers as people read them.

A Budget is one or more limits, "2000 steps", "1.5M tokens", "3 epochs", "10 min"; a bare number means steps; a comma
joins several and the first that is due counts. "tokens" is the users' word for targets and is kept as a spelling.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

_UNITS = {
    "step": "steps", "steps": "steps", "iter": "steps", "iters": "steps",
    "target": "targets", "targets": "targets", "token": "targets", "tokens": "targets",
    "epoch": "epochs", "epochs": "epochs",
    "s": "seconds", "sec": "seconds", "second": "seconds", "seconds": "seconds",
    "min": "minutes", "minute": "minutes", "minutes": "minutes",
    "h": "hours", "hour": "hours", "hours": "hours",
}  # fmt: skip
_SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600}
_SCALE = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_MOST = 10**18  # more than any run can use, and small enough for 64 bits
_LIMIT = re.compile(r"^\s*([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*([kKMBGT]?)\s*([a-z]*)\s*$")


@dataclass(frozen=True)
class Budget:
    """Limits in any of four units; None means no limit in that unit. All None, or a zero, means never."""

    steps: int | None = None
    targets: int | None = None
    epochs: float | None = None
    seconds: float | None = None
    text: str = "0"

    @classmethod
    def parse(cls, value: Budget | int | float | str) -> Budget:
        """Reads what a user wrote; raises ValueError with the reason in plain words."""
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool):
            raise ValueError("is not a quantity")
        text = str(value).strip()
        limits: dict[str, Decimal] = {}
        for part in text.split(","):
            match = _LIMIT.match(part)
            if not match:
                shown = part.strip()
                raise ValueError(f"{shown!r} is not a quantity such as 2000, '1.5M tokens', '3 epochs' or '10 min'")
            number, scale, word = match.groups()
            unit = _UNITS.get(word or "steps")
            if unit is None:
                raise ValueError(f"{word!r} is not a unit; use steps, tokens, epochs, s, min or h")
            if float(number) * _SCALE[scale] > _MOST:
                raise ValueError(f"{part.strip()!r} is too large; the limit is {_MOST:.0e}")
            amount = Decimal(number) * _SCALE[scale]  # as a float, 1.001k would not be a whole number
            if unit in _SECONDS:
                amount, unit = amount * _SECONDS[unit], "seconds"
            if unit in ("steps", "targets") and amount != int(amount):
                raise ValueError(f"{part.strip()!r} is not a whole number of {unit}")
            if unit in limits:
                raise ValueError(f"{text!r} gives two limits in {unit}")
            limits[unit] = amount
        steps, targets, epochs, seconds = map(limits.get, ("steps", "targets", "epochs", "seconds"))
        return cls(
            steps=None if steps is None else int(steps),
            targets=None if targets is None else int(targets),
            epochs=None if epochs is None else float(epochs),
            seconds=None if seconds is None else float(seconds),
            text=text,
        )

    @property
    def is_never(self) -> bool:
        given = [v for v in (self.steps, self.targets, self.epochs, self.seconds) if v is not None]
        return not given or any(v == 0 for v in given)

    def __str__(self) -> str:
        return self.text


def count(value: float) -> str:
    """1234567 -> '1.23M': a count, three significant digits; below ten thousand every whole one."""
    if not math.isfinite(value):
        return str(value)
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if suffix == "k" else limit)
            return f"{scaled:.3g}{suffix}" if scaled < 999.5 else f"{scaled:.0f}{suffix}"
    return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """4325 -> '1 h 12 m'."""
    if seconds != seconds or seconds == float("inf"):
        return "?"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} m"
    return f"{hours // 24} d {hours % 24} h"


def size(num_bytes: float) -> str:
    """1536000 -> '1.5 MB'."""
    for limit, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:.1f} {suffix}"
    return f"{num_bytes:.0f} B"


def percent(share: float) -> str:
    """0.123 -> '12.3 %'; whole ones without a point."""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
