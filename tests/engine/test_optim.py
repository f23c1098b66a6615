"""If this fails, a group of parameters is updated with other settings than its recipe gave, or an old save is lost."""

from __future__ import annotations

import copy

import torch
from torch import nn

from rung.engine.config import Optimizer as OptimizerConfig
from rung.engine.optim import build_optimizers, set_lr
from rung.engine.state import State
from rung.engine.step import ObjectiveState
from rung.recipe import Loss, Objective, ParameterGroup

CPU = torch.device("cpu")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def optimizers_of(model: nn.Module, *groups: ParameterGroup, name: str = "adamw", decay: float = 0.3) -> list:
    cfg = OptimizerConfig()
    cfg.name, cfg.weight_decay = name, decay
    objective = Objective("squares", groups, lambda batch, draw: Loss(torch.zeros(()), torch.ones(())))
    return build_optimizers(objective, list(model.parameters()), cfg, CPU)


def state_of(model: nn.Module, optimizers: list) -> State:
    loss = Loss(torch.zeros(()), torch.ones(()))
    return State(model, [ObjectiveState("squares", lambda b, d: loss, list(model.parameters()), optimizers)], None)


def steps(model: nn.Module, optimizers: list, num_steps: int = 3, lr: float | None = 1e-2) -> list[torch.Tensor]:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(num_steps):
        model.zero_grad()
        model(x).square().sum().backward()
        if lr is not None:
            set_lr(optimizers, lr)
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_groups_are_updated_as_torch_does_it_with_these_settings() -> None:
    model, twin = net(), net()
    groups = [
        ParameterGroup("first", model[0].parameters(), lr_scale=0.5, betas=(0.8, 0.9), weight_decay=0.2),
        ParameterGroup("norm", model[1].parameters(), eps=1e-3),
        ParameterGroup("last", model[2].parameters(), lr_scale=2.0),
    ]
    cfg = OptimizerConfig()
    usual = {"betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps}
    reference = torch.optim.AdamW(
        [
            {**usual, "params": twin[0].parameters(), "lr": 5e-3, "betas": (0.8, 0.9), "weight_decay": 0.2},
            {**usual, "params": twin[1].parameters(), "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0},
            {**usual, "params": [twin[2].weight], "lr": 2e-2, "weight_decay": 0.3},
            {**usual, "params": [twin[2].bias], "lr": 2e-2, "weight_decay": 0.0},
        ],
        fused=True,
    )
    mine, theirs = steps(model, optimizers_of(model, *groups)), steps(twin, [reference], lr=None)
    assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


def test_how_parameters_are_cut_into_groups_of_equal_settings_is_not_seen_in_a_save() -> None:
    model = net()
    whole = optimizers_of(model, ParameterGroup("all", model.parameters()))
    cut = optimizers_of(
        model, ParameterGroup("last", model[2].parameters()), ParameterGroup("rest", model[:2].parameters(), muon=True)
    )
    assert [o.state_dict()["param_groups"] for o in whole] == [o.state_dict()["param_groups"] for o in cut]
    members = [[[id(p) for p in g["params"]] for o in made for g in o.param_groups] for made in (whole, cut)]
    assert members[0] == members[1]


def test_vectors_stay_apart_without_decay_as_older_saves_have_them() -> None:
    model = net()
    (optimizer,) = optimizers_of(model, ParameterGroup("all", model.parameters()), decay=0.0)
    assert [{p.ndim for p in group["params"]} for group in optimizer.param_groups] == [{2}, {1}]


def test_a_save_without_scales_loads_and_the_recipe_says_the_scale() -> None:
    model = net()
    made = optimizers_of(model, ParameterGroup("all", model.parameters(), lr_scale=0.25))
    steps(model, made)
    state = state_of(model, made)
    saved = copy.deepcopy(state.tensors())
    for group in saved["optimizers"]["squares"][0]["param_groups"]:
        del group["lr_scale"]
    later = optimizers_of(model, ParameterGroup("all", model.parameters(), lr_scale=0.25))
    state_of(model, later).load_tensors(saved)
    set_lr(later, 1.0)
    assert [group["lr"] for group in later[0].param_groups] == [0.25, 0.25]
    assert torch.equal(later[0].state[model[0].weight]["exp_avg"], made[0].state[model[0].weight]["exp_avg"])


def test_muon_takes_the_matrices_of_its_groups_with_their_scale_and_decay() -> None:
    model = net()
    muon, adamw = optimizers_of(
        model,
        ParameterGroup("first", model[0].parameters(), lr_scale=0.5, weight_decay=0.0, muon=True),
        ParameterGroup("rest", model[1:].parameters()),
        name="muon",
    )
    (group,) = muon.param_groups
    assert [id(p) for p in group["params"]] == [id(model[0].weight)]
    assert (group["lr_scale"], group["weight_decay"]) == (0.5, 0.0)
    assert sum(len(g["params"]) for g in adamw.param_groups) == 5
