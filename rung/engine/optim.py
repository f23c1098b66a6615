"""Builds the optimizers of an objective.

AdamW, fused where torch has it, with decay on matrices and embeddings only (two dimensions or more) unless a parameter
group says otherwise. With `optimizer.name=muon` the matrices of groups that allow it go to Muon, scaled to the update
size of AdamW so that one learning rate serves both, and the rest stays with AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rung.engine.config import Optimizer as OptimizerConfig
from rung.errors import ConfigError
from rung.recipe import Objective, ParameterGroup

FUSED_DEVICES = ("cpu", "cuda", "mps")


def build_optimizers(
    objective: Objective, parameters: Sequence[nn.Parameter], cfg: OptimizerConfig, device: torch.device
) -> list[torch.optim.Optimizer]:
    """`parameters` are those to train; their order numbers an optimizer's state in a checkpoint, not that of groups."""
    group_of = {id(p): group for group in objective.groups for p in group.parameters}
    optimizers: list[torch.optim.Optimizer] = []
    rest = list(parameters)
    if cfg.name == "muon":
        matrices = [p for p in parameters if p.ndim == 2 and group_of[id(p)].muon]
        if not matrices:
            raise ConfigError(
                f"optimizer.name=muon, but the recipe lets Muon take no matrix of {objective.name}; "
                "use optimizer.name=adamw",
                code="not-supported",
            )
        rest = [p for p in parameters if p.ndim != 2 or not group_of[id(p)].muon]
        groups = _torch_groups(matrices, group_of, cfg)
        for group in groups:
            del group["betas"], group["eps"]  # Muon has none of the first, and its eps is another thing
        optimizers.append(torch.optim.Muon(groups, lr=0.0, momentum=cfg.momentum, adjust_lr_fn="match_rms_adamw"))
    if rest:
        fused = device.type in FUSED_DEVICES
        optimizers.append(torch.optim.AdamW(_torch_groups(rest, group_of, cfg), lr=0.0, fused=fused))
    return optimizers


def _torch_groups(
    parameters: Sequence[nn.Parameter], group_of: Mapping[int, ParameterGroup], cfg: OptimizerConfig
) -> list[dict[str, Any]]:
    """Parameters with the same settings together, those of two or more dimensions first."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for parameter in sorted(parameters, key=lambda p: p.ndim < 2):
        group, is_matrix = group_of[id(parameter)], parameter.ndim >= 2
        usual_decay = cfg.weight_decay if is_matrix else 0.0
        settings = {
            "weight_decay": usual_decay if group.weight_decay is None else group.weight_decay,
            "lr_scale": group.lr_scale,
            "betas": tuple(group.betas or (cfg.beta1, cfg.beta2)),
            "eps": cfg.eps if group.eps is None else group.eps,
        }
        key = (is_matrix, *settings.values())  # vectors apart even without decay: so they are in every checkpoint
        found.setdefault(key, {"params": [], **settings})["params"].append(parameter)
    return list(found.values())


def set_lr(optimizers: Iterable[torch.optim.Optimizer], lr: float) -> None:
    """The learning rate of the step, times the scale of each group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
