"""For scripts written for wandb: `import rung.wandb as wandb`, and little else changes.

`config`, `run` and `summary` are those of the current run. What only wandb has can be called and does nothing, with one
warning; what decides which runs there are (sweep, agent, Api) is an error.
"""

from __future__ import annotations

from typing import Any

from rung.script import current, missing
from rung.script.current import define_metric, finish, init, log, watch
from rung.script.media import Audio, Histogram, Image, Table

__all__ = ["Audio", "Histogram", "Image", "Table", "define_metric", "finish", "init", "log", "watch"]
_OF_THE_RUN = ("config", "summary")


def __getattr__(name: str) -> Any:
    run = current.current()
    if name == "run":
        return run
    if name in _OF_THE_RUN:
        if run is None:
            raise AttributeError(f"wandb.{name} is that of a run; start one: wandb.init(project=...)")
        return getattr(run, name)
    if name in missing.OF_THE_MODULE:
        return missing.missing(name, run)
    raise AttributeError(f"module 'rung.wandb' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({"run", *_OF_THE_RUN, *__all__, *missing.OF_THE_MODULE})
