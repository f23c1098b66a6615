"""In which numbers to compute. Weights are float32 whatever a checkpoint says; only forward and backward may be lower.

float16 needs a loss scale, whose skipped steps are calibration and not failures; bfloat16 and float32 need none.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from torch import Tensor

from rung.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> tuple[torch.device, str]:
    """The device and, where it was chosen for the user, the reason."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda"), "auto: a GPU is there"
        return torch.device("cpu"), "auto: no GPU found"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"system.device={name} is not a device; use auto, cpu, cuda, cuda:0 or mps", code="bad-device"
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"system.device={name}, but this machine shows {torch.cuda.device_count()} GPUs to torch; use auto or cpu",
            code="no-device",
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("system.device=mps, but torch finds no Apple GPU here; use auto or cpu", code="no-device")
    return device, ""


def slowness(dtype: torch.dtype) -> float:
    """How many times as long as in float32 a product of matrices takes on this CPU; few have arithmetic for halves."""

    def best_s(dtype: torch.dtype) -> float:
        matrix, seconds = torch.ones(128, 128, dtype=dtype), []
        for _ in range(4):
            begun = time.perf_counter()
            matrix @ matrix
            seconds.append(time.perf_counter() - begun)
        return min(seconds)

    return best_s(dtype) / best_s(torch.float32)


class LossScale:
    """What float16 losses are multiplied by, so that small gradients do not vanish.

    Halved when a step overflows, which is then left out; doubled after 2000 good ones. As torch's GradScaler, but all
    on the device and for a step as a whole, so that nothing waits and several objectives skip together.
    """

    START, GROWTH_STEPS = 2.0**16, 2000

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(self.START, device=device)
        self._good_steps = torch.zeros((), device=device)

    def is_fatal(self, bad_loss: Tensor, bad_norm: Tensor) -> Tensor:
        """An overflow of gradients is calibration, as long as there is room below."""
        return bad_loss | (bad_norm & (self.scale < 1.0))

    def update(self, is_bad: Tensor, latch: Tensor) -> None:
        """Once the latch is shut the scale stands still: it belongs to the state before the bad step."""
        grows = ~is_bad & (self._good_steps + 1 >= self.GROWTH_STEPS)
        good = torch.where(is_bad | grows, 0.0, self._good_steps + 1)
        scale = torch.where(is_bad, self.scale * 0.5, torch.where(grows, self.scale * 2.0, self.scale))
        self._good_steps = torch.where(latch > 0, self._good_steps, good)
        self.scale = torch.where(latch > 0, self.scale, scale)

    def state_dict(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        self.scale = saved["scale"].to(self.scale.device)
        self._good_steps = saved["good_steps"].to(self.scale.device)


class Precision:
    """The autocast of forward and loss, and the scale of float16 losses."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.reason = ""
        if name == "auto":
            has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            name = "bfloat16" if has_bf16 else "float32"
            self.reason = f"auto: {'this GPU has it' if has_bf16 else f'on {device.type}'}"
        elif name != "float32" and device.type == "cpu" and (factor := slowness(DTYPES[name])) > 3:
            self.reason = f"on this CPU {factor:.0f} times as slow as float32, which system.dtype=float32 asks for"
        self.name = name
        self.device_type = device.type
        self.loss_scale = LossScale(device) if name == "float16" else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.name == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, DTYPES[self.name])
