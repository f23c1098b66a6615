"""Load and temperature of the GPU that trains, asked of its driver (NVML); nothing where that is not there."""

from __future__ import annotations

import ctypes
import functools

import torch


def gpu_state(device: torch.device) -> dict[str, float]:
    """How busy the GPU was over the driver's last window, as a ratio, and its temperature in degrees Celsius."""
    found = _handle(device.index if device.index is not None else torch.cuda.current_device())
    if found is None:
        return {}
    nvml, handle = found
    state, rates, degrees = {}, (ctypes.c_uint * 2)(), ctypes.c_uint()
    if nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == 0:
        state["gpu_load_ratio"] = rates[0] / 100
    if nvml.nvmlDeviceGetTemperature(handle, 0, ctypes.byref(degrees)) == 0:
        state["gpu_temperature_c"] = float(degrees.value)
    return state


@functools.cache
def _handle(index: int) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """By its uuid: torch may have been given only some of the GPUs, and counts them anew."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    except (OSError, AttributeError, RuntimeError):
        return None
    handle = ctypes.c_void_p()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    return nvml, handle
