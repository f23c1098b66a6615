"""The lab book for Lightning's Trainer.

    from rung.own_loop.lightning import RungLogger
    logger = RungLogger("mine", why="...")
    logger.watch(model)
    Trainer(logger=logger, ...)

It takes the run that is going on, or starts one with the first thing that Lightning tells. A run that failed ends at
once; one that went well stays open for tests, and ends with `rung.finish()`, the next run, or the script.

The surprising thing: numbers are Lightning's own, and it gives an eval the number of the last update before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rung.own_loop import current
from rung.own_loop.run import OwnRun
from rung.own_loop.settings import tree_of


class Book:
    """All of it but the base class, which is Lightning's own."""

    def __init__(self, experiment: str | None = None, **how: Any) -> None:
        """The words of `rung.init`."""
        super().__init__()
        self._experiment, self._how = experiment, how
        self._run: OwnRun | None = None

    @property
    def experiment(self) -> OwnRun:
        """The run; silent on ranks other than the first."""
        if self._run is None:
            self._run = current.current() or current.init(self._experiment, **self._how)
        return self._run

    @property
    def name(self) -> str:
        return self.experiment.id.rpartition("/")[0] or str(self._experiment or "own")

    @property
    def version(self) -> str:
        return self.experiment.id.rpartition("/")[2]

    @property
    def save_dir(self) -> str | None:
        """Where Lightning puts checkpoints: beside the rows."""
        path = self.experiment.path
        return None if path is None else str(path.parent.parent)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.experiment.log(metrics, step=step)

    def log_hyperparams(self, params: Any = None, *more: Any, **known: Any) -> None:
        """Part of the configuration; a value that cannot be written becomes text."""
        self.experiment.config.update(tree_of(params))

    def watch(self, model: Any, optimizer: Any = None, every: int = 20) -> None:
        """Norms of the gradients, weights and updates; the optimizer is found when it first steps."""
        self.experiment.watch(model, optimizer, every)

    def log_graph(self, *model: Any) -> None:
        """The code is in the run; a graph is not kept."""

    def save(self) -> None:
        """Rows are written when they are logged."""

    def finalize(self, status: str) -> None:
        if status not in ("success", "finished") and self._run is not None:
            from rung.own_loop.run import ending

            self._run.finish(*ending(_raised()))


def _raised() -> BaseException:
    """Lightning calls while it handles what was raised."""
    import sys

    return sys.exc_info()[1] or RuntimeError("the trainer says that it failed")


if TYPE_CHECKING:
    RungLogger = Book


def __getattr__(name: str) -> Any:
    """The class is made when it is asked for: Lightning takes seconds to import, and may not be installed."""
    if name == "RungLogger":
        try:
            from lightning.pytorch.loggers import Logger
        except ImportError:
            from pytorch_lightning.loggers import Logger

        made = type("RungLogger", (Book, Logger), {"__module__": __name__, "__doc__": Book.__doc__})
        globals()[name] = made
        return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
