"""All that a run is at step t, besides code, config and data: what a checkpoint holds and a resume brings back.

There is no random state and no iterator in it: both are functions of the seed and of the numbers here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from rung.engine.precision import LossScale
from rung.engine.step import Trained


@dataclass
class Progress:
    """The numbers of the state; step t means that t updates have been made."""

    step: int = 0
    position: int = 0  # rows of the training stream seen
    targets: int = 0
    elapsed_s: float = 0.0
    skipped: int = 0  # updates left out: float16 overflowed, or the guard skipped a bad batch
    evals: list[float] = field(default_factory=list)  # losses of the first eval set, oldest first
    eval_steps: list[int] = field(default_factory=list)
    best_loss: float | None = None
    best_step: int | None = None


@dataclass
class State:
    model: nn.Module
    objectives: list[Trained]
    loss_scale: LossScale | None
    progress: Progress = field(default_factory=Progress)

    def tensors(self) -> dict[str, Any]:
        """Optimizers and loss scale, as plain containers of tensors and numbers."""
        return {
            "optimizers": {o.name: [optimizer.state_dict() for optimizer in o.optimizers] for o in self.objectives},
            "loss_scale": self.loss_scale.state_dict() if self.loss_scale is not None else None,
        }

    def load_tensors(self, saved: dict[str, Any]) -> None:
        for objective in self.objectives:
            for optimizer, state in zip(objective.optimizers, saved["optimizers"][objective.name], strict=True):
                optimizer.load_state_dict(state)
        if self.loss_scale is not None and saved["loss_scale"] is not None:
            self.loss_scale.load_state_dict(saved["loss_scale"])

    def numbers(self) -> dict[str, Any]:
        return asdict(self.progress)


def set_training(model: nn.Module) -> None:
    """Training mode, except for parts that are frozen whole: their dropout and statistics must stand still."""
    model.train()
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            module.eval()
