"""Named sums and counts, added up on the device and divided once, at the end.

Training and eval add with the same code, so that a loss means the same in both. float64, because a count of targets
outgrows the whole numbers of float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rung.engine.clock import PHASES
from rung.errors import RecipeError
from rung.recipe import Loss, Part

# What the engine itself writes into a row; a part of that name would hide it.
TAKEN = {"loss", "norm", "norm_clipped", "scale", "skipped", "diverged", "lr", "mfu", "targets", "step", "unix_s",
         "step_s", "copy_s", "targets_min", "bad_micro", "norm_first", "rows_first", "follows", "fresh", "batch_hash",
         "memory_mb", "reserved_mb", "rss_mb", *(f"{phase}_s" for phase in PHASES)}  # fmt: skip


class Sums:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._dtype = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        self._pairs: dict[str, Tensor] = {}
        self.micros: list[Tensor] = []  # sum and count of the loss, of each

    def add(self, loss: Loss, measured: Mapping[str, Part] = {}) -> None:
        parts = [*loss.parts.items(), *measured.items()]
        for name, _ in parts:
            if name in TAKEN or name.endswith(("/sum", "/count")) or name.startswith(("look/", "probe/")):
                raise RecipeError(
                    f"a part or measure of the loss is called {name!r}, a name the engine uses; rename it"
                )
        if len({name for name, _ in parts}) < len(parts):
            raise RecipeError("measure() returns a name that the loss has as a part; rename it")
        for name, pair in [("loss", (loss.sum, loss.count)), *parts]:
            value = torch.stack([self._number(x) for x in pair])
            if name == "loss":
                self.micros.append(value)
            self._pairs[name] = self._pairs[name] + value if name in self._pairs else value

    def _number(self, value: Tensor | float) -> Tensor:
        return torch.as_tensor(value, device=self._device).detach().to(self._dtype).reshape(())

    @property
    def names(self) -> list[str]:
        return list(self._pairs)

    def packed(self, names: list[str]) -> Tensor:
        """(names, 2): sum and count of each; nothing was added to a name that is not known here."""
        nothing = torch.zeros(2, dtype=self._dtype, device=self._device)
        return torch.stack([self._pairs.get(name, nothing) for name in names])
