"""One update of a loop that is not rung's: judged, applied or left out, measured.

The order is the engine's: the norm of the gradients before anything clips them, then the verdict on the device, then
all optimizers or none. With a GradScaler the scaler decides, as it always does, until it can no longer be calibration.
What becomes of a bad step is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rung.engine.guard import Before, Guard, bring_back, copy_before, moments_of, not_finite
from rung.engine.layers import Layers
from rung.engine.signals import Layered
from rung.engine.step import Trained
from rung.errors import UserError
from rung.forensics.first import is_finite
from rung.own_loop.kept import LOSSES, trained_of

MOST_OVERFLOWS = 8  # in a row, once steps have been applied: a scale that was right is too high by a factor or two
LOW = (torch.float16, torch.bfloat16)


class Update:
    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None,
        armed_steps: int,
        layers_every: int,
    ) -> None:
        self._model, self._optimizers, self._scaler, self._layers_every = model, optimizers, scaler, layers_every
        self._trained, self._known_sizes = self._trained_now(), self._sizes()
        self.device = self._trained.parameters[0].device
        self.guard = Guard(self.device, model, armed_steps)
        self.guard.arm(0)
        self.broken: list[str] = []  # tensors that the last armed update would have broken
        self._layers = Layers(model, [self._trained])
        self._num_overflows = self._num_applied = 0

    def _trained_now(self) -> Trained:
        """In the order of the model, in which clip_grad_norm_ adds up too."""
        trained, own = trained_of(self._optimizers), {id(p): n for n, p in enumerate(self._model.parameters())}
        strangers = sum(id(p) not in own for p in trained.parameters)
        if strangers or not trained.parameters:
            what = f"{strangers} tensors that the model does not have" if strangers else "nothing"
            raise UserError(f"the optimizers train {what}; pass one module that holds all that is trained")
        trained.parameters.sort(key=lambda p: own[id(p)])
        return trained

    def take(
        self, step: int, values: Tensor, clip: float, tell: Callable[[str], None]
    ) -> tuple[dict[str, Tensor], dict[str, Layered]]:
        """`values` are the losses of the micros. Returns signals as tensors that nobody has waited for, and tables."""
        self._notice_new_parameters(step)
        parameters, scale = self._trained.parameters, self._unscale()
        norms = self._norms(parameters)
        norm = clipped = torch.linalg.vector_norm(norms)
        if clip > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
            clipped = norm * (clip / (norm + 1e-6)).clamp(max=1.0)
        before = copy_before(parameters, self._optimizers) if self.guard.is_armed(step) else None
        measures = self._measures(step)
        if measures:
            self._layers.begin([self._trained], None if before is None else before.weights)
        is_bad = ~torch.isfinite(values)
        skip = self._apply(is_bad.any(), ~torch.isfinite(norm), scale)
        if before is not None:
            self._undo_if_broken(before)
        tables = self._measured(norms, tell) if measures else {}
        signals = {"loss": values.sum(), "norm": norm, "norm_clipped": clipped, "skipped": skip}
        signals |= {"diverged": self.guard.latch.clone()}
        signals["bad_micro"] = torch.where(is_bad.any(), is_bad.int().argmax(), -1)
        if scale is not None:
            signals["scale"] = torch.tensor(scale, device=self.device)
        return signals, tables

    def _notice_new_parameters(self, step: int) -> None:
        """Somebody who adds a group begins anew with it: new moments are worth a look."""
        if self._sizes() != self._known_sizes:
            self._known_sizes, self._trained = self._sizes(), self._trained_now()
            self._layers = Layers(self._model, [self._trained])
            self.guard.arm(step)

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups]

    def _norms(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Of each gradient, in float32 at least: in float16 they overflow where nothing else does."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        if not dense:
            return torch.zeros(1, device=self.device)
        is_low = any(g.dtype in LOW for g in dense)
        norms = torch._foreach_norm(dense, 2, torch.float32) if is_low else torch._foreach_norm(dense)
        return torch.stack([norm.to(self.device) for norm in norms])

    def _apply(self, bad_loss: Tensor, bad_norm: Tensor, scale: float | None) -> Tensor:
        """1 where the update was left out."""
        if scale is not None:
            return self._apply_scaled(bool(bad_loss), bool(bad_norm), scale)
        skip = self.guard.judge(bad_loss | bad_norm, bad_loss | bad_norm)
        self.guard.apply(self._optimizers, skip)
        for optimizer in self._optimizers:  # who goes on without the guard must not find our flag
            optimizer.__dict__.pop("found_inf", None)
        return skip

    def _unscale(self) -> float | None:
        if self._scaler is None:
            return None
        for optimizer in self._optimizers:
            try:
                self._scaler.unscale_(optimizer)
            except RuntimeError as error:
                if "already been called" not in str(error):  # by the loop, which wanted to clip
                    raise
        return self._scaler.get_scale()

    def _apply_scaled(self, bad_loss: bool, bad_norm: bool, scale: float) -> Tensor:
        """An overflow is calibration as long as there is room below, as before the first step that was applied."""
        assert self._scaler is not None
        gradients = [p.grad for p in self._trained.parameters if p.grad is not None]
        is_overflow = bad_norm and not all(is_finite(g) for g in gradients)
        self._num_overflows = self._num_overflows + 1 if is_overflow else 0
        has_room = scale > 1.0 and (self._num_overflows < MOST_OVERFLOWS or not self._num_applied)
        is_fatal = bad_loss or (bad_norm and not (is_overflow and has_room))
        is_bad, fatal = torch.tensor([bad_loss or bad_norm, is_fatal], device=self.device).unbind()
        skip = self.guard.judge(is_bad, fatal)
        if is_fatal:
            self._scaler.update(scale)  # leaves it where it was, and forgets the step
            return skip
        for optimizer in self._optimizers:
            self._scaler.step(optimizer)
        self._scaler.update()
        self._num_applied += not is_overflow
        return skip

    def _undo_if_broken(self, before: Before) -> None:
        """An armed update that made weights or moments non-finite is taken back. Here the host waits."""
        parameters = self._trained.parameters
        bad = not_finite([p.detach() for p in parameters])
        if not bad and not not_finite(moments_of(self._optimizers)):
            return
        self.broken = self._layers.names_of([parameters[number] for number in bad]) or ["optimizer state"]
        bring_back(before, parameters, self._optimizers)
        self.guard.latch.fill_(1.0)

    def _measures(self, step: int) -> bool:
        every = self._layers_every
        is_time = every > 0 and (step % every == 0 or step < min(20, every))
        return is_time and not any(p.grad is not None and p.grad.is_sparse for p in self._trained.parameters)

    def _measured(self, norms: Tensor, tell: Callable[[str], None]) -> dict[str, Layered]:
        try:
            self._layers.end({LOSSES: norms})
        except Exception as error:  # an optimizer with a state of its own kind: the loop is worth more
            self._layers_every = 0
            tell(f"{type(error).__name__}: {error}")
            return {}
        return {"tensors": Layered(self._layers.names, {**self._layers.measured, **self._layers.fixed})}

    def dtype(self) -> str:
        return str(self._trained.parameters[0].dtype).removeprefix("torch.")

    def lrs(self) -> list[Any]:
        """Of all groups; tensors are copied, since somebody's schedule writes into them."""
        lrs = [group["lr"] for optimizer in self._optimizers for group in optimizer.param_groups]
        return [lr.clone() if isinstance(lr, Tensor) else lr for lr in lrs]
