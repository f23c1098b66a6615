"""If this fails, a sweep file may ask for something that nobody reads, or may not ask for something that is read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rung.sweep.emit import kubernetes, skypilot
from rung.sweep.launch import launcher_of, ray, slurm
from rung.sweep.launch.local import LocalLauncher
from rung.sweep.plan import LAUNCH
from rung.sweep.space import Sweep
from tests.sweep.made import made_sweep


class Noting(dict[str, Any]):
    """Options of a launcher, and which of them were looked at."""

    def __init__(self, **given: Any) -> None:
        super().__init__(given)
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def test_the_options_of_a_launcher_are_those_that_are_read(tmp_path: Path) -> None:
    options = Noting(on="ray", image="lab/rung:1")
    sweep: Sweep = dataclasses.replace(made_sweep(tmp_path / "runs"), launch=options)
    launcher_of(sweep, None)
    LocalLauncher.of(sweep)
    ray._resources(sweep)
    slurm._parameters(sweep)
    kubernetes(sweep, sweep.points)
    options["claim"] = "s3://bucket/runs"
    skypilot(sweep, sweep.points)
    assert options.read == set(LAUNCH)
    assert len(LAUNCH) == len(set(LAUNCH))
