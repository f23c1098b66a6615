"""All that a run is at step t, besides code, config and data: what a checkpoint holds and a resume restores.

There is no random state and no iterator in it: both are functions of the seed and of the numbers here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rung.engine.guarded import ObjectiveState
from rung.engine.precision import LossScale


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

    def add_eval(self, results: Mapping[str, Mapping[str, float]]) -> bool:
        """Notes an eval at this step; whether the loss of the first set is a new lowest one."""
        loss = next(iter(results.values()))["loss"]
        self.evals.append(loss)
        self.eval_steps.append(self.step)
        is_best = math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss)
        if is_best:
            self.best_loss, self.best_step = loss, self.step
        return is_best


@dataclass
class State:
    model: nn.Module
    objectives: list[ObjectiveState]
    loss_scale: LossScale | None
    progress: Progress = field(default_factory=Progress)
    # Fingerprints of tensors that are not trained, as the recipe's model() made them: saves leave them out while they
    # are so. What came from elsewhere, or is changed by hand, is written.
    frozen: dict[str, str] = field(default_factory=dict)
    redo_eval_at: int | None = None  # a resumed run repeats the eval that was due at its save

    def tensors(self) -> dict[str, Any]:
        """Optimizers and loss scale, as plain containers of tensors and numbers."""
        return {
            "optimizers": {o.name: [optimizer.state_dict() for optimizer in o.optimizers] for o in self.objectives},
            "loss_scale": self.loss_scale.state_dict() if self.loss_scale is not None else None,
        }

    def load_tensors(self, saved: dict[str, Any]) -> None:
        for objective in self.objectives:
            for optimizer, state in zip(objective.optimizers, saved["optimizers"][objective.name], strict=True):
                scales = [group.get("lr_scale", 1.0) for group in optimizer.param_groups]
                optimizer.load_state_dict(state)
                for group, scale in zip(optimizer.param_groups, scales, strict=True):
                    group["lr_scale"] = scale  # the recipe's of today, as the learning rate is; older saves have none
        if self.loss_scale is not None and saved["loss_scale"] is not None:
            self.loss_scale.load_state_dict(saved["loss_scale"])


def set_training(model: nn.Module) -> None:
    """Training mode, except for parts that are frozen whole: their dropout and statistics must stand still."""
    model.train()
    for name in frozen_modules(model):
        model.get_submodule(name).eval()


def frozen_modules(model: nn.Module) -> list[str]:
    """Parts whose parameters are all frozen, each without its own parts."""
    found: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name == outer or not outer or name.startswith(f"{outer}.") for outer in found)
        parameters = list(module.parameters())
        if not is_inside and parameters and not any(p.requires_grad for p in parameters):
            found.append(name)
    return found
