"""What the benchmarks share: the facts of the machine, the spread of a figure, and the last line of each.

A benchmark never fails because a machine is slow: the last line says `below` (or `above`), and a reader decides.
Figures of two parties are compared pair by pair, as they were measured in turns, so that what disturbs one disturbs the
other.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata


def facts(*packages: str, **more: object) -> str:
    """One line on the machine: processors, load, versions, and whatever the benchmark adds."""
    found = [
        f"{os.cpu_count()} processors",
        f"load {os.getloadavg()[0]:.1f}",
        f"python {platform.python_version()}",
        *(f"{package} {version_of(package)}" for package in packages),
        *(f"{name} {value}" for name, value in more.items()),
    ]
    return "machine  " + ", ".join(found)


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """'median [min max]'."""
    low, high = min(values), max(values)
    return f"{format(statistics.median(values), form)} [{format(low, form)} {format(high, form)}]"


def pairwise(ours: Iterable[float], theirs: Iterable[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def verdict(name: str, values: Sequence[float], bar: float, *, is_least: bool = True, form: str = ".3f") -> str:
    """The last line: the median of `values` against a bar that it must reach, or with is_least=False not pass."""
    median = statistics.median(values)
    is_ok = median >= bar if is_least else median <= bar
    word = "ok" if is_ok else "below" if is_least else "above"
    return f"RATIO {name} {spread(values, form)} bar{'>=' if is_least else '<='}{bar:g} {word}"


def in_turns(num_rounds: int, parties: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """A B C A B C ...: each party's figure of each round. The first round warms up and is dropped."""
    figures: dict[str, list[float]] = {name: [] for name in parties}
    for _ in range(num_rounds + 1):
        for name, measure in parties.items():
            figures[name].append(measure())
    return {name: values[1:] for name, values in figures.items()}
