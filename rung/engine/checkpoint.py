"""Saves and restores a run.

    checkpoints/<step>/model.safetensors   weights, float32, each tensor once however many names it has
    checkpoints/<step>/optimizer.pt        optimizers and scaler; loads with weights_only=True
    checkpoints/<step>/state.json          numbers, identity of the recipe, config
    checkpoints/<step>/manifest.json       sizes and hashes of the above
    checkpoints/best, checkpoints/pinned   step numbers

A save is whole or absent: it is written beside its final name, fsynced, listed in a manifest with hashes, and moved
there last. What to throw away is decided by `to_delete`, which never names the best, the last or a pinned one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rung.engine.state import Progress, State
from rung.errors import CheckpointError
from rung.files import sha256, sync, write_whole

FILES = ("model.safetensors", "optimizer.pt", "state.json")


@dataclass(frozen=True)
class Checkpoints:
    """The saves of one run."""

    folder: Path

    def steps(self) -> list[int]:
        """Steps that have a whole save, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(
            int(p.name) for p in self.folder.iterdir() if p.name.isdigit() and (p / "manifest.json").is_file()
        )

    def at(self, step: int) -> Path:
        return self.folder / f"{step:08d}"

    @property
    def best(self) -> int | None:
        marked = self._marked("best")
        return marked[0] if marked else None

    def mark_best(self, step: int) -> None:
        write_whole(self.folder / "best", f"{step}\n".encode())

    @property
    def pinned(self) -> list[int]:
        return self._marked("pinned")

    def pin(self, step: int) -> None:
        write_whole(self.folder / "pinned", "".join(f"{s}\n" for s in sorted({*self.pinned, step})).encode())

    def _marked(self, name: str) -> list[int]:
        file = self.folder / name
        return [int(line) for line in file.read_text().split()] if file.is_file() else []

    def save(self, state: State, extra: Mapping[str, Any]) -> Path:
        """Saves the state under its step; a whole save of the same step is left as it is."""
        step = state.progress.step
        final = self.at(step)
        if (final / "manifest.json").is_file():
            return final
        beside = self.folder / f".{step:08d}.{os.getpid()}.tmp"
        try:
            beside.mkdir(parents=True)
            save_file(canonical(state.model), beside / "model.safetensors")
            torch.save(state.tensors(), beside / "optimizer.pt")
            numbers = {"progress": state.numbers(), **extra}
            (beside / "state.json").write_text(json.dumps(numbers, indent=1), "utf-8")
            files = {name: {"bytes": (beside / name).stat().st_size, "sha256": sha256(beside / name)} for name in FILES}
            (beside / "manifest.json").write_text(json.dumps({"step": step, "files": files}, indent=1), "utf-8")
            for name in (*FILES, "manifest.json"):
                sync(beside / name)
            sync(beside)
            os.rename(beside, final)
            sync(self.folder)
        except Exception as error:
            shutil.rmtree(beside, ignore_errors=True)
            # safetensors and torch.save wrap the operating system's word in exceptions of their own
            if isinstance(error, OSError) or "os error" in str(error).lower() or "write" in str(error).lower():
                raise CheckpointError(
                    f"step {step} could not be saved in {self.folder}: {_reason(error)}; earlier saves are untouched; "
                    "make room or mend the permissions, then `rung resume` the run"
                ) from error
            raise
        return final

    def clean(self, keep: int) -> None:
        """Rotation, and what a killed process left half-written."""
        for step in to_delete(self.steps(), keep, {*self.pinned, *([self.best] if self.best is not None else [])}):
            # The manifest goes first: a folder without one does not count as a save, so no moment shows half of one.
            (self.at(step) / "manifest.json").unlink()
            shutil.rmtree(self.at(step), ignore_errors=True)

    def sweep(self) -> None:
        """Removes what killed processes left behind. Only for the process that owns the run."""
        for path in self.folder.glob(".*.tmp"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name.isdigit() and not (path / "manifest.json").is_file():
                shutil.rmtree(path, ignore_errors=True)


def to_delete(steps: Iterable[int], keep: int, protected: Iterable[int]) -> list[int]:
    """Steps to throw away so that `keep` are left besides the protected ones; 0 keeps all, the last always stays."""
    steps = sorted(steps)
    if keep == 0 or not steps:
        return []
    safe = {*protected, *steps[-keep:]}
    return [step for step in steps if step not in safe]


@dataclass(frozen=True)
class Saved:
    """A checkpoint read back and found whole."""

    path: Path
    step: int
    weights: dict[str, Tensor]
    state: dict[str, Any]

    @property
    def progress(self) -> Progress:
        return Progress(**self.state["progress"])

    def tensors(self) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(self.path / "optimizer.pt", map_location="cpu", weights_only=True)
        return loaded


def load(path: Path) -> Saved:
    """Reads a checkpoint after checking every byte of it."""
    manifest = _manifest(path)
    for name, spec in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing{_elsewhere(path)}")
        if file.stat().st_size != spec["bytes"]:
            raise CheckpointError(
                f"{path} is damaged: {name} has {file.stat().st_size} bytes, the manifest says {spec['bytes']}"
                f"{_elsewhere(path)}"
            )
        found = sha256(file)
        if found != spec["sha256"]:
            raise CheckpointError(
                f"{path} is damaged: {name} has hash {found[:4]}.., the manifest says {spec['sha256'][:4]}.."
                f"{_elsewhere(path)}"
            )
    state = json.loads((path / "state.json").read_text("utf-8"))
    return Saved(path, manifest["step"], load_file(path / "model.safetensors"), state)


def read_state(path: Path) -> dict[str, Any]:
    """The numbers of a checkpoint alone, without its weights."""
    _manifest(path)
    state: dict[str, Any] = json.loads((path / "state.json").read_text("utf-8"))
    return state


def check_identity(saved: Saved, identity: Mapping[str, Any]) -> None:
    """Refuses weights whose numbers mean something else here: another vocabulary, another tokenizer."""
    before = saved.state.get("identity", {})
    for name in {**before, **identity}:
        if before.get(name) != identity.get(name):
            raise CheckpointError(
                f"{saved.path} was trained with {name} {before.get(name)}, this config has {identity.get(name)}; "
                "its weights would mean something else: use the data and the recipe it was trained with"
            )


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], where: Path) -> None:
    """Copies weights into a model whose tensors must have the same names and shapes; the model keeps its dtype."""
    own = canonical(model)
    missing, extra = [n for n in own if n not in weights], [n for n in weights if n not in own]
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"has {extra[0]}, which this model does not"
        raise CheckpointError(
            f"{where} is of another model: it {what} ({len(missing)} missing, {len(extra)} extra); "
            "use the model section of its own config"
        )
    for name, tensor in own.items():
        if tensor.shape != weights[name].shape:
            raise CheckpointError(
                f"{where} is of another shape: {name} is {_shape(weights[name])} there and {_shape(tensor)} here; "
                "use the model section of its own config"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def canonical(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with each tensor once, under the first of its names (a tied head is the embedding)."""
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and identity in seen:
            continue
        seen.add(identity)
        state[name] = tensor.detach()
    return state


def _manifest(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    if not file.is_file():
        raise CheckpointError(f"no checkpoint at {path} (it has no manifest.json){_elsewhere(path)}")
    try:
        manifest: dict[str, Any] = json.loads(file.read_text("utf-8"))
        manifest["files"], manifest["step"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path} is damaged: manifest.json cannot be read{_elsewhere(path)}") from None
    return manifest


def _elsewhere(path: Path) -> str:
    """Names the newest other save of the run, if there is one."""
    if not path.name.isdigit():
        return ""
    others = [step for step in Checkpoints(path.parent).steps() if step != int(path.name)]
    return f"; the last whole save besides is {others[-1]}" if others else "; there is no other save"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"


def _reason(error: Exception) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())[:200]
