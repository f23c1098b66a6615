"""Figures of this machine, kept as one page per call, and what became slower since the earlier pages.

A page is a JSON file. Pages are compared where machine, torch, device and size of the benchmark are the same. A figure
is slower where its median is worse than that of the earlier pages by more than the noise: the spread within this page
and within the earlier ones, how far the earlier pages lie apart, and 2 % in any case.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rung import parse
from rung.files import write_whole

LEAST_NOISE = 0.02  # of a median
MOST_EARLIER = 10  # pages


@dataclass(frozen=True)
class Figure:
    name: str
    values: Sequence[float]  # one per round
    unit: str  # "x" is a ratio
    about: str
    better: Literal["higher", "lower"] = "higher"

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True)
class Comparison:
    """A figure beside the same one of earlier pages; ratio above 1 is better."""

    name: str
    before: float  # median of the earlier medians
    ratio: float
    noise: float  # a share of `before`
    num_pages: int

    @property
    def is_slower(self) -> bool:
        return self.ratio < 1 - self.noise

    @property
    def is_faster(self) -> bool:
        return self.ratio > 1 + self.noise


def machine(device: str, is_quick: bool) -> dict[str, Any]:
    """What must be equal for two pages to be compared."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    return {
        "host": platform.node(), "device": device, "processor": name, "torch": torch.__version__,
        "python": platform.python_version(), "quick": is_quick,
    }  # fmt: skip


def page_of(machine: Mapping[str, Any], figures: Sequence[Figure]) -> dict[str, Any]:
    from rung import __version__

    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    listed = {figure.name: {**asdict(figure), "median": figure.median} for figure in figures}
    return {"time": now, "rung": __version__, "machine": dict(machine), "figures": listed}


def keep(page: Mapping[str, Any], folder: Path) -> Path:
    """A file of its own; one second may see several."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = str(page["time"]).replace(":", "").replace("+0000", "Z")
    number = 1
    while (path := folder / f"{stem}-{number:02d}.json").exists():
        number += 1
    write_whole(path, json.dumps(page, indent=1).encode())
    return path


def earlier(folder: Path, machine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The last pages of such a machine, oldest first; what is no page is passed over."""
    return list(_pages(folder, machine))[-MOST_EARLIER:]


def compare(page: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    found = []
    for name, figure in page["figures"].items():
        past = [one["figures"][name] for one in before if _is_figure(one["figures"].get(name))]
        if not past:
            continue
        medians = [float(one["median"]) for one in past]
        base = statistics.median(medians)
        if base <= 0 or figure["median"] <= 0:
            continue
        between = max(abs(median - base) for median in medians) / base
        within = max(_half_range(one) for one in (figure, *past))
        now = float(figure["median"])
        ratio = now / base if figure["better"] == "higher" else base / now
        found.append(Comparison(name, base, ratio, max(LEAST_NOISE, between, within), len(past)))
    return found


def _is_figure(found: Any) -> bool:
    """Whether this is what an earlier page should have; a page may be written by another version, or by hand."""
    try:
        return math.isfinite(float(found["median"])) and math.isfinite(_half_range(found))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, IndexError):
        return False


def _half_range(figure: Mapping[str, Any]) -> float:
    """Half of the middle half of the rounds' range, so that one disturbed round does not hide everything."""
    values = sorted(float(value) for value in figure["values"])
    cut = len(values) // 4
    inner = values[cut : len(values) - cut]
    return (inner[-1] - inner[0]) / 2 / statistics.median(values)


def _pages(folder: Path, machine: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.json")):
        try:
            page = parse.json(parse.read_bytes(path))
        except (OSError, ValueError):
            continue
        if isinstance(page, dict) and page.get("machine") == dict(machine) and isinstance(page.get("figures"), dict):
            yield page


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.machine()
