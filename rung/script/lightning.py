"""The lab book for Lightning's Trainer.

    from rung.script.lightning import RungCallback, RungLogger
    logger = RungLogger("mine", why="...")
    Trainer(logger=logger, callbacks=[RungCallback(logger)], ...)

The callback makes each step a guarded step: one whose loss or gradients are not finite is not applied, and is kept for
`rung replay`. The logger alone records; `logger.watch(model)` adds norms. It uses the current run, or starts one with
the first call from Lightning. A run that failed ends at once; one that went well stays open for tests, and ends with
`rung.finish()`, the next run, or the script. Step numbers are Lightning's own, which gives an eval the number of the
last update before it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rung.script import current
from rung.script.run import OwnRun
from rung.script.settings import tree_of

if TYPE_CHECKING:
    from rung.script.guard import ScriptGuard


class LoggerMixin:
    """Logs to a run what the Trainer tells its logger; RungLogger is this with Lightning's base class."""

    def __init__(self, experiment: str | None = None, **options: Any) -> None:
        """The arguments of `rung.init`."""
        super().__init__()
        self._experiment, self._options = experiment, options
        self._run: OwnRun | None = None

    @property
    def experiment(self) -> OwnRun:
        """The run; silent on ranks other than the first."""
        if self._run is None:
            self._run = current.current() or current.init(self._experiment, **self._options)
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

    def finalize(self, status: str) -> None:
        if status not in ("success", "finished") and self._run is not None:
            # Lightning calls while it handles what was raised.
            error = sys.exc_info()[1] or RuntimeError("the trainer says that it failed")
            self._run.end_by(error)


class CallbackMixin:
    """Guards the steps of a Trainer; RungCallback is this with Lightning's base class."""

    def __init__(self, logger: LoggerMixin, *, policy: str = "stop", every: int = 20) -> None:
        """policy: stop raises rung.Diverged and keeps the step for `rung replay`, skip leaves the batch out.
        every: updates between norms per tensor, 0 for none."""
        super().__init__()
        self._logger, self._policy, self._every = logger, policy, every
        self._batch: Any = None
        self.guard: ScriptGuard | None = None  # where there is one: see _cannot_guard

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        run = self._logger.experiment
        if run.path is None:
            return
        if why := _cannot_guard(trainer, pl_module):
            run.tell(f"steps are recorded but not guarded: {why}")
            run.watch(pl_module, every=self._every)
            return
        divisor = trainer.accumulate_grad_batches

        def loss(batch: Any) -> Any:
            pl_module.log = pl_module.log_dict = lambda *args, **options: None  # a replay logs nothing
            try:
                output = pl_module.training_step(*batch)
            finally:
                del pl_module.log, pl_module.log_dict
            return (output["loss"] if isinstance(output, Mapping) else output) / divisor

        self.guard = run.guard(
            pl_module,
            trainer.optimizers,
            loss=loss,
            policy=self._policy,
            armed_steps=0,  # no copies of weights and moments in a memory that others have planned
            layers_every=self._every,
            clips_itself=bool(trainer.gradient_clip_val),
        )
        self.guard.attach()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._batch = (batch, batch_idx)
        if self.guard is not None:
            self.guard.begin()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self.guard is not None:
            self.guard.micro(loss, self._batch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.guard is not None:
            self.guard.detach()
            self.guard.wait()


def _cannot_guard(trainer: Any, module: Any) -> str:
    """Why the steps of a training cannot be held back; nothing where they can."""
    if trainer.world_size > 1:
        return "several processes train together"
    if len(trainer.optimizers) != 1:
        return f"there are {len(trainer.optimizers)} optimizers, which step one by one"
    if not module.automatic_optimization:
        return "the module steps its optimizer itself; use run.guard there"
    if str(trainer.precision).startswith("16"):
        return "the Trainer's gradient scaler decides which steps are applied"
    if len(inspect.signature(module.training_step).parameters) != 2:
        return "training_step does not take (batch, batch_idx)"
    return ""


if TYPE_CHECKING:
    RungLogger = LoggerMixin
    RungCallback = CallbackMixin


def __getattr__(name: str) -> Any:
    """The classes are made when they are asked for: Lightning takes seconds to import, and may not be installed."""
    if name in ("RungLogger", "RungCallback"):
        try:
            import lightning.pytorch as lightning
        except ImportError:
            import pytorch_lightning as lightning
        mixin, base = (
            (LoggerMixin, lightning.loggers.Logger) if name == "RungLogger" else (CallbackMixin, lightning.Callback)
        )
        made = type(name, (mixin, base), {"__module__": __name__, "__doc__": mixin.__doc__})
        globals()[name] = made
        return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
