"""Measures the updates of somebody's own loop, through the hooks that torch's optimizers have.

The norm of all gradients and the learning rate at each update; norms of each gradient, weight and change in the first
updates and then at every so many, in the columns of the engine, so that the doctor reads them. Where norms would take
more than a share of the time, some are left out after the first updates: on a CPU, reading 100 thousand gradients takes
1 % of a step of 10 ms. Numbers stay on the device. Nothing of the model or the gradients is changed.

Hooks see the gradients as the optimizer gets them. A loop that clips has clipped them by then, so what clip_grad_norm_
returns, logged as grad_norm, is the norm before, and ours becomes norm_clipped. An optimizer that is given a closure
gets them in the middle of its step, so then they are looked at after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rung.engine.fingerprints import checksums
from rung.engine.guarded import ObjectiveState, gradient_norms
from rung.engine.layers import Layers
from rung.engine.signals import Layered
from rung.errors import UserError
from rung.runs.record import Record
from rung.script.capture import OBJECTIVE, objective_of
from rung.script.current import torch_seed
from rung.script.logged import is_away
from rung.script.replay import unwrapped
from rung.script.step_axis import Update
from rung.text import error_text

if TYPE_CHECKING:
    from rung.script.run import OwnRun

FIRST = 20  # updates that are all measured
# Of an optimizer's first group, and what scripts call it. Not lr, which a schedule moves: each row has it.
_KEPT = {
    "name": ("optim", "optimizer_name", "opt"),
    "eps": ("eps", "epsilon", "adam_eps", "adam_epsilon"),
    "weight_decay": ("weight_decay", "wd"),
    "beta1": ("beta1", "adam_beta1", "betas"),
    "beta2": ("beta2", "adam_beta2", "betas"),
    "momentum": ("momentum",),
    "nesterov": ("nesterov",),
    "amsgrad": ("amsgrad",),
}
CLIP_NAMES = ("grad_clip", "max_grad_norm", "clip_grad_norm", "gradient_clip_val", "clip", "max_norm")


class TimeBudget:
    """May spend half of a share of the time that passes, as one of two; with a share of 1 whatever it likes."""

    def __init__(self, share: float) -> None:
        self._rate, self._next_s = (max(share, 1e-9) / 2 if share < 1 else float("inf")), 0.0

    def spent(self, begun: float) -> None:
        now = time.perf_counter()
        self._next_s = max(now, self._next_s) + (now - begun) / self._rate

    def is_affordable(self) -> bool:
        """Whether what was spent so far has been earned; nothing is saved up."""
        return time.perf_counter() >= self._next_s


class Watch:
    def __init__(self, run: OwnRun, model: Any, optimizer: Any, every: int, share: float) -> None:
        if not isinstance(model, nn.Module):
            raise UserError(f"watch() takes a module of torch, not {type(model).__name__}", code="bad-model")
        self._run, self._model, self._every, self._share = run, unwrapped(model), int(every), float(share)
        self._norm, self._table = TimeBudget(self._share), TimeBudget(self._share)
        self._handles: list[Any] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        # Of what the optimizers train, known with the first update; again when a group is added.
        self._num_groups = -1
        self._trained: ObjectiveState | None = None
        self._layers: Layers | None = None
        self._is_host = False
        self._parameters: dict[int, list[Tensor]] = {}
        # Of the update that is going on.
        self._norms: list[Tensor] = []  # of each gradient, one tensor for each optimizer that has begun this update
        self._wants_norm = self._wants_table = False

        describe_start(run, self._model)
        named = [] if optimizer is None else optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        try:
            named = [inner_optimizer(each) for each in named]
        except UserError as error:  # wandb has a loss there
            run.tell(f"{error}; the first one that steps the model is watched")
            named = []
        if named:
            self._attach(named)
            return
        own = {id(p) for p in self._model.parameters()}

        def look_at(found: torch.optim.Optimizer, *call: Any) -> None:
            """Takes the first that holds something of the model."""
            if not self._optimizers and any(id(p) in own for group in found.param_groups for p in group["params"]):
                self._attach([found])  # torch asks the hooks of one optimizer after those of all: this step is seen too

        self._handles.append(register_optimizer_step_pre_hook(look_at))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _attach(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            self._optimizers.append(optimizer)
            self._handles.append(optimizer.register_step_pre_hook(lambda *call: self._safely(self._before, call)))
            self._handles.append(optimizer.register_step_post_hook(lambda *call: self._safely(self._after, call)))
        describe_optimizers(self._run, self._optimizers, self._model)

    def _safely(self, measure: Callable[..., None], call: Sequence[Any]) -> None:
        """A hook that raises would end somebody's training."""
        try:
            measure(*call)
        except Exception as error:
            self.remove()
            self._run.tell(f"the optimizer is no longer watched: {error_text(error)}")

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Most updates of a fast loop come by here and only have their rate noted: what is not wanted is not asked."""
        if optimizer is self._optimizers[0]:
            number = self._run.axis.updates.num_updates
            self._norms, is_first = [], number < FIRST
            if number == FIRST:  # what was spent on the first ones is forgiven
                self._norm, self._table = TimeBudget(self._share), TimeBudget(self._share)
            is_due = self._every > 0 and (number % self._every == 0 or (is_first and number < self._every))
            self._wants_table = is_due and (is_first or self._table.is_affordable())
            self._wants_norm = self._wants_table or is_first or not self._is_host or self._norm.is_affordable()
            if self._wants_norm:
                num_groups = sum(len(optimizer.param_groups) for optimizer in self._optimizers)
                if num_groups != self._num_groups:
                    self._num_groups = num_groups
                    self._trained = objective_of(self._optimizers)
                    self._layers = Layers(self._model, [self._trained])
                    self._is_host = all(p.is_cpu for p in self._trained.parameters)
                    self._parameters = {
                        id(optimizer): [p for group in optimizer.param_groups for p in group["params"]]
                        for optimizer in self._optimizers
                    }
            if self._wants_table and self._layers is not None and self._trained is not None:
                begun = time.perf_counter()
                self._layers.begin([self._trained], None)
                self._table.spent(begun)
        if self._wants_norm and not _has_closure(args, kwargs):
            self._take_norms(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._wants_norm and _has_closure(args, kwargs):
            self._take_norms(optimizer)
        if optimizer is not self._optimizers[-1]:
            return
        lr = self._optimizers[0].param_groups[0]["lr"]
        update = Update({"lr": lr if type(lr) is float else float(lr) if not is_away(lr) else lr.clone()})
        found_inf = getattr(optimizer, "found_inf", None)  # by which a GradScaler has a fused one leave the step out
        skipped = 0.0 if found_inf is None else found_inf.item() if found_inf.is_cpu else found_inf.reshape(()).clone()
        update.values["skipped"] = skipped
        if self._norms:
            norms = torch.cat([some.to(self._norms[0].device) for some in self._norms])
            norm = torch.linalg.vector_norm(norms)
            update.values["norm"] = norm if is_away(norm) else norm.item()
            if self._wants_table and (layers := self._layers) is not None:
                begun = time.perf_counter()
                try:
                    layers.end({OBJECTIVE: norms})
                    update.tables = {"tensors": Layered(layers.names, {**layers.measured, **layers.fixed})}
                except Exception as error:  # an optimizer with a state of its own kind, sharded tensors
                    self._every = 0
                    said = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                    self._run.tell(f"norms per tensor are left out: {said}")
                self._table.spent(begun)
        self._run.axis.updates.add(update)

    def _take_norms(self, optimizer: torch.optim.Optimizer) -> None:
        begun = time.perf_counter()
        gradients = [g for p in self._parameters[id(optimizer)] if (g := p.grad) is not None]
        scale = getattr(optimizer, "grad_scale", None)  # a GradScaler leaves it to a fused optimizer to unscale
        with torch.no_grad():
            if gradients:
                norms = gradient_norms(gradients, gradients[0].device)
                self._norms.append(norms if scale is None else norms / scale)
        self._norm.spent(begun)


def _has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("closure", args[1] if len(args) > 1 else None) is not None  # the first is the optimizer itself


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer whose step does it, out of somebody's wrapper, as accelerate has one."""
    for _ in range(8):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"watch() takes an optimizer of torch, not {type(optimizer).__name__}", code="bad-optimizer")
    return optimizer


def describe_start(run: OwnRun, model: nn.Module) -> None:
    """What the weights were, while they still are; what there is to train."""
    parameters = list(model.parameters())
    if not run.axis.updates.num_updates and parameters:
        run.keep("init.json", checksums(model))
    device = parameters[0].device if parameters else torch.device("cpu")
    group = torch.distributed
    run.derive(
        parameters=sum(p.numel() for p in parameters),
        trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        dtype=str(parameters[0].dtype).removeprefix("torch.") if parameters else None,
        num_ranks=group.get_world_size() if group.is_available() and group.is_initialized() else 1,
        threads=torch.get_num_threads(),
    )


def describe_optimizers(run: OwnRun, optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
    """What the optimizer does, also where the script's configuration does not say; and the seed, if there is one."""
    group = dict(optimizers[0].param_groups[0])
    if "betas" in group:
        group["beta1"], group["beta2"] = group["betas"]
    found = {"name": type(optimizers[0]).__name__.lower()} | {key: group[key] for key in _KEPT if key in group}
    found = {key: value.item() if isinstance(value, Tensor) else value for key, value in found.items()}
    run.add_config({f"optimizer.{key}": (value, _KEPT[key]) for key, value in found.items()})
    # A loop with several optimizers may have a guard for each: what one of them trains is not left out.
    run.trained |= {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    run.derive(left_out=[name for name, p in model.named_parameters() if p.requires_grad and id(p) not in run.trained])
    if (seed := torch_seed()) is not None:
        run.out.do(Record.update, seed=seed)
