"""Builds the optimizers of an objective.

AdamW, fused where torch has it, with decay on matrices and embeddings only (two dimensions or more). With
`optimizer.name=muon` the objective's hidden matrices go to Muon, scaled to the update size of AdamW so that one
learning rate serves both, and the rest stays with AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from rung.engine.config import Optimizer as OptimizerConfig
from rung.errors import ConfigError
from rung.recipe import Objective

FUSED_DEVICES = ("cpu", "cuda", "mps")


def build_optimizers(
    objective: Objective, parameters: list[nn.Parameter], cfg: OptimizerConfig, device: torch.device
) -> list[torch.optim.Optimizer]:
    optimizers: list[torch.optim.Optimizer] = []
    rest = parameters
    momentum = cfg.momentum  # read whether used or not: a key belongs to the optimizer as a whole
    betas = (cfg.beta1, cfg.beta2)
    if cfg.name == "muon":
        hidden = {id(p) for p in objective.hidden}
        matrices = [p for p in parameters if id(p) in hidden and p.ndim == 2]
        if not matrices:
            raise ConfigError(
                f"optimizer.name=muon, but the recipe names no hidden matrices for {objective.name}; "
                "use optimizer.name=adamw"
            )
        rest = [p for p in parameters if id(p) not in {id(m) for m in matrices}]
        optimizers.append(
            torch.optim.Muon(
                matrices,
                lr=0.0,
                weight_decay=cfg.weight_decay,
                momentum=momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if rest:
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": cfg.weight_decay},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizers.append(
            torch.optim.AdamW(
                [group for group in groups if group["params"]],
                lr=0.0,
                betas=objective.betas or betas,
                eps=cfg.eps,
                fused=device.type in FUSED_DEVICES,
            )
        )
    return optimizers


def set_lr(optimizers: Iterable[torch.optim.Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
