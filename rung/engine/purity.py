"""Evals, samples and probes run code of a recipe, and must not change what is learned: this measures it, and undoes it.

Before such code everything a step depends on is copied on its own device; afterwards it is compared bit for bit, and
what differs is put back. Counters of versions would be cheaper and miss every write through `.data`; a sum would need
the copy all the same, to put anything back. The host waits for one number, where it waits for the eval itself anyway,
and nothing is added to a step. What does not fit in memory beside the rest, frozen weights first, is compared by
fingerprints alone: then a change is named and stays.

Measured with AdamW on one busy CPU core, for each eval or sample: 2 ms for 28,544 parameters in 116 tensors, 0.16 s for
10.7M parameters (128 MB with both moments).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rung.engine.fingerprints import fingerprint
from rung.engine.state import State

ROOM = 0.5  # of the free memory of a device that copies may take
GROUP_BYTES = 64 << 20  # that are compared at once: a model has hundreds of small tensors


class _Kept(NamedTuple):
    name: str
    tensor: Tensor
    alias: Tensor  # its storage, which stays what it was when `tensor.data` becomes another one
    is_trained: bool
    is_told: bool  # a cache is put back without a word: whoever keeps one writes into it


class Changes(dict[str, str]):
    """What was changed -> how; `undone` says whether all of it was put back."""

    undone = True

    @property
    def told(self) -> dict[str, str]:
        """Without caches, which change by their nature."""
        return {name: how for name, how in self.items() if how != CACHE}


CACHE = "a buffer that no checkpoint holds"


class Kept:
    """All that a step depends on, as it is now."""

    @torch.no_grad()
    def __init__(self, state: State) -> None:
        self._state = state
        model, optimizers = state.model, [x for o in state.objectives for x in o.optimizers]
        self._modules = [
            (name, m, dict(m._parameters), dict(m._buffers), dict(m._modules)) for name, m in model.named_modules()
        ]
        self._groups = [(x, [dict(group) for group in x.param_groups]) for x in optimizers]
        self._states = [(x, {p: dict(values) for p, values in x.state.items()}) for x in optimizers]
        self._scale = None if state.loss_scale is None else dict(state.loss_scale.state_dict())
        self._globals = random.getstate(), np.random.get_state(), torch.get_default_dtype()
        self._threads, self._matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
        self._wants_gradient = [(name, p, p.requires_grad, p.grad) for name, p in model.named_parameters()]
        self._tensors = list(self._find(optimizers))
        self._copies: list[tuple[list[_Kept], Tensor]] = []
        self._fingerprints: list[tuple[_Kept, str]] = []
        kept = sorted(self._tensors, key=lambda one: not one.is_trained)
        room = {device: ROOM * _free(device) for device in {one.alias.device for one in kept}}
        group: list[_Kept] = []
        for one in kept:
            size = one.alias.numel() * one.alias.element_size()
            if size > room[one.alias.device]:
                self._fingerprints.append((one, fingerprint(one.alias)))
                continue
            room[one.alias.device] -= size
            if group and (one.alias.device != group[0].alias.device or _bytes_of(group) + size > GROUP_BYTES):
                self._copies.append((group, _flat(group)))
                group = []
            group.append(one)
        if group:
            self._copies.append((group, _flat(group)))

    def _find(self, optimizers: list[torch.optim.Optimizer]) -> Iterator[_Kept]:
        seen: set[int] = set()
        names = {id(p): name for name, p in self._state.model.named_parameters()}

        def kept(name: str, tensor: object, is_trained: bool, is_told: bool = True) -> Iterator[_Kept]:
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or not tensor.numel():
                return
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield _Kept(name, tensor, tensor.detach(), is_trained, is_told)

        for name, module, parameters, buffers, _ in self._modules:
            dot = f"{name}." if name else ""
            for own, parameter in parameters.items():
                if parameter is not None:
                    yield from kept(dot + own, parameter, parameter.requires_grad)
            for own, buffer in buffers.items():
                yield from kept(dot + own, buffer, True, own not in module._non_persistent_buffers_set)
        for optimizer in optimizers:
            for parameter, values in optimizer.state.items():
                for own, value in values.items():
                    yield from kept(f"{own} of {names.get(id(parameter), 'a parameter')}", value, True)

    @torch.no_grad()
    def restore(self) -> Changes:
        """Puts back what is no longer as it was, and says what that is."""
        found = Changes()
        self._restore_structure(found)
        for one in self._tensors:
            now = one.tensor
            if now.dtype != one.alias.dtype:
                found[one.name] = f"cast to {str(now.dtype).removeprefix('torch.')}"
            elif now.shape != one.alias.shape or now.device != one.alias.device:
                found[one.name] = f"{tuple(now.shape)} on {now.device} in place of {tuple(one.alias.shape)}"
            if now.data_ptr() != one.alias.data_ptr() or one.name in found:
                if one.name not in found and not _equal(now, one.alias):
                    found[one.name] = "other numbers" if one.is_told else CACHE
                now.data = one.alias
        same = [torch.equal(_flat(group), copy) for group, copy in self._copies]
        for is_same, (group, copy) in zip(same, self._copies, strict=True):
            for one, before in zip(group, _pieces(group, copy), strict=True) if not is_same else ():
                if not _equal(one.alias, before):
                    found.setdefault(one.name, "other numbers" if one.is_told else CACHE)
                    one.alias.copy_(before)
        for one, before_that in self._fingerprints:
            if fingerprint(one.alias) != before_that:
                found[one.name] = "other numbers; there was no room for a copy"
                found.undone = False
        for name, parameter, wanted, gradient in self._wants_gradient:
            if parameter.requires_grad != wanted:
                found.setdefault(name, f"requires_grad={parameter.requires_grad}")
                parameter.requires_grad_(wanted)
            if parameter.grad is not gradient:
                found.setdefault(name, "a gradient was left in it")
                parameter.grad = gradient
        self._restore_globals(found)
        return found

    def _restore_structure(self, found: Changes) -> None:
        """Parameters and modules that were replaced or taken out; what is new and of nobody's business stays."""
        for name, module, parameters, buffers, children in self._modules:
            dot = f"{name}." if name else ""
            for own, was in parameters.items():
                if own not in module._parameters or module._parameters[own] is not was:
                    found[dot + own] = "replaced" if own in module._parameters or hasattr(module, own) else "taken out"
                    module.__dict__.pop(own, None)
                    module._buffers.pop(own, None)
                    module._parameters[own] = was
            for own in [own for own in module._parameters if own not in parameters]:
                found[dot + own] = "a new parameter"
                del module._parameters[own]
            for own, buffer in buffers.items():
                is_cache = own in module._non_persistent_buffers_set
                if own not in module._buffers or module._buffers[own] is not buffer:
                    now = module._buffers.get(own)
                    if not is_cache and not (
                        now is not None and buffer is not None and now.shape == buffer.shape and _equal(now, buffer)
                    ):
                        found[dot + own] = "replaced"
                    if not is_cache:
                        module._buffers[own] = buffer
            if list(module._modules.items()) != list(children.items()):
                changed = [own for own, child in children.items() if module._modules.get(own) is not child]
                changed += [own for own in module._modules if own not in children]
                found[dot + (changed[0] if changed else "modules")] = "another module"
                module._modules.clear()
                module._modules.update(children)
        for optimizer, groups in self._groups:
            if len(optimizer.param_groups) != len(groups) or any(
                now.get(key) is not value and now.get(key) != value
                for now, before in zip(optimizer.param_groups, groups, strict=False)
                for key, value in before.items()
                if key != "params" and not isinstance(value, Tensor)
            ):
                found["the optimizer's settings"] = "changed"
                optimizer.param_groups[:] = groups
        for optimizer, states in self._states:
            if any(
                optimizer.state.get(p, {}).get(key) is not value and not isinstance(value, int | float)
                for p, values in states.items()
                for key, value in values.items()
            ) or len(optimizer.state) != len(states):
                found["the optimizer's state"] = "replaced"
                optimizer.state.clear()
                optimizer.state.update({p: dict(values) for p, values in states.items()})
        scale = self._state.loss_scale
        before = self._scale or {}
        if scale is not None and any(scale.state_dict()[key] is not value for key, value in before.items()):
            found["the loss scale"] = "changed"
            scale.load_state_dict(before)

    def _restore_globals(self, found: Changes) -> None:
        """Numbers drawn from global generators are what samples do: they are given back without a word. That of torch
        is seeded before every micro."""
        random.setstate(self._globals[0])
        np.random.set_state(self._globals[1])
        if torch.get_default_dtype() != self._globals[2]:
            found["torch's default dtype"] = str(torch.get_default_dtype())
            torch.set_default_dtype(self._globals[2])
        if torch.get_num_threads() != self._threads:
            found["torch's number of threads"] = str(torch.get_num_threads())
            torch.set_num_threads(self._threads)
        if torch.get_float32_matmul_precision() != self._matmul:
            found["torch's float32 matmul precision"] = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(self._matmul)


@contextmanager
def pure(state: State) -> Iterator[Changes]:
    """Leaves the state as it found it, also after an exception; the mapping is filled with what was undone."""
    found, kept = Changes(), Kept(state)
    try:
        yield found
    finally:
        changed = kept.restore()
        found.update(changed)
        found.undone = changed.undone


def named(changes: Mapping[str, str], most: int = 3) -> str:
    shown = ", ".join(f"{name} ({how})" for name, how in list(changes.items())[:most])
    return shown + (f" and {len(changes) - most} more" if len(changes) > most else "")


def _bytes_of(group: list[_Kept]) -> int:
    return sum(one.alias.numel() * one.alias.element_size() for one in group)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _flat(group: list[_Kept]) -> Tensor:
    """The bytes of all of them in one piece."""
    return torch.cat([_bits(one.alias) for one in group])


def _pieces(group: list[_Kept], flat: Tensor) -> Iterator[Tensor]:
    sizes = [one.alias.numel() * one.alias.element_size() for one in group]
    for one, piece in zip(group, flat.split(sizes), strict=True):
        # A copy, since the bytes of a number must begin where one of its size may.
        yield piece.clone().view(one.alias.dtype).view(one.alias.shape)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit: NaN is itself, and 0 is not -0."""
    return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and torch.equal(_bits(a), _bits(b))


def _free(device: torch.device) -> float:
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + reserved)
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):  # not every system tells
        return 8e9
