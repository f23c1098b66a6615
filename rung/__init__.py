"""rung trains generative sequence models and keeps the lab book while it does.

    run = rung.train("piano", ["optimizer.max_iters=200"])      docs/python.md
    run = rung.init("mine", config={"lr": 1e-3})                docs/script.md, for a training loop of your own

Each name below is imported when it is asked for: `import rung` imports neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rung import runs
    from rung.api import evaluate, load, resume, sample, train
    from rung.engine.guarded import Diverged
    from rung.errors import UserError
    from rung.random import Draw
    from rung.recipe import Compile, Input, Loss, Objective, ParameterGroup, Recipe, Sample, Stream
    from rung.runs.query import Run
    from rung.script.current import define_metric, finish, init, log, watch
    from rung.script.guard import guard
    from rung.script.replay import replay

__all__ = [
    "Compile", "Diverged", "Draw", "Input", "Loss", "Objective", "ParameterGroup", "Recipe", "Run", "Sample", "Stream",
    "UserError", "__version__", "define_metric", "evaluate", "finish", "guard", "init", "load", "log", "replay",
    "resume", "runs", "sample", "train", "watch",
]  # fmt: skip
_NAMES = {
    "rung.api": ("train", "resume", "evaluate", "load", "sample"),
    "rung.runs.query": ("Run",),
    "rung.script.current": ("init", "log", "watch", "define_metric", "finish"),
    "rung.script.guard": ("guard",),
    "rung.script.replay": ("replay",),
    "rung.recipe": ("Recipe", "Stream", "Loss", "Objective", "ParameterGroup", "Compile", "Input", "Sample"),
    "rung.random": ("Draw",),
    "rung.engine.guarded": ("Diverged",),
    "rung.errors": ("UserError",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "runs":
        return import_module("rung.runs")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'rung' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
