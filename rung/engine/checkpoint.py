"""Saves and restores a run.

    checkpoints/<step>/model.safetensors   weights, float32, each tensor once however many names it has
    checkpoints/<step>/optimizer.pt        optimizers and scaler; loads with weights_only=True
    checkpoints/<step>/state.json          numbers, identity of the recipe, config
    checkpoints/<step>/manifest.json       sizes and hashes of the above
    checkpoints/best, checkpoints/pinned   step numbers; see rung.runs.marks

A save is whole or absent: it is written beside its final name, fsynced, listed in a manifest with hashes, and moved
there last. What to throw away is decided by `to_delete`, which never names the best, the last or a pinned one.
"""

from __future__ import annotations

import itertools
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
from rung.runs import marks
from rung.runs.files import locked

FILES = ("model.safetensors", "optimizer.pt", "state.json")


@dataclass(frozen=True)
class Checkpoints:
    """The saves of one run."""

    folder: Path

    def steps(self) -> list[int]:
        """Steps that have a whole save, oldest first."""
        return marks.saved_steps(self.folder)

    def at(self, step: int) -> Path:
        return marks.save_folder(self.folder, step)

    @property
    def best(self) -> int | None:
        marked = marks.read_mark(self.folder, marks.BEST)
        return marked[0] if marked else None

    def mark_best(self, step: int) -> None:
        self._mark(marks.BEST, [step])

    @property
    def pinned(self) -> list[int]:
        return marks.read_mark(self.folder, marks.PINNED)

    def pin(self, step: int) -> None:
        self._mark(marks.PINNED, {*self.pinned, step})

    def _mark(self, name: str, steps: Iterable[int]) -> None:
        try:
            write_whole(self.folder / name, marks.mark_text(steps))
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.folder / name}: {_reason(error)}; the saves are untouched; make room or mend the "
                "permissions, then `rung resume` the run"
            ) from error

    def save(self, state: State, extra: Mapping[str, Any]) -> Path:
        """Saves the state under its step, in place of an earlier save of the same step."""
        step = state.progress.step
        final = self.at(step)
        if (final / "manifest.json").is_file():
            self._remove(step)
        beside = self.folder / f".{step:08d}.{os.getpid()}.tmp"
        try:
            beside.mkdir(parents=True)
            weights = {name: tensor.contiguous() for name, tensor in canonical(state.model).items()}
            save_file(weights, beside / "model.safetensors")
            with (beside / "optimizer.pt").open("wb") as file:  # given a path, torch.save hides what the disk said
                torch.save(state.tensors(), file)
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
            # torch.save raises something of its own after the OSError; safetensors only quotes it
            if _os_error(error) is not None or "os error" in str(error).lower():
                raise CheckpointError(
                    f"step {step} could not be saved in {self.folder}: {_reason(error)}; earlier saves are untouched; "
                    "make room or mend the permissions, then `rung resume` the run"
                ) from error
            raise
        return final

    def set_aside(self, after: int) -> list[int]:
        """Moves saves later than a step out of the way: a run that goes on from there has another future.

        They are kept under checkpoints/aside-<n>/, where they can be loaded by path but count no more.
        """
        later = [step for step in self.steps() if step > after]
        if not later:
            return []
        try:
            place = self.folder / f"aside-{1 + len(list(self.folder.glob('aside-*')))}"
            place.mkdir()
            for step in later:
                os.rename(self.at(step), place / self.at(step).name)
        except OSError as error:
            raise CheckpointError(
                f"cannot set aside the saves after {after} in {self.folder}: {_reason(error)}"
            ) from error
        if self.best in later:
            (self.folder / marks.BEST).unlink()
        self._mark(marks.PINNED, [step for step in self.pinned if step <= after])
        return later

    def clean(self, keep: int) -> None:
        """Rotation. The marks are read each time, under the lock of whoever pins: a pin counts from that moment on."""
        if not self.folder.is_dir():
            return
        with locked(self.folder):
            safe = {*self.pinned, *([self.best] if self.best is not None else [])}
            for step in to_delete(self.steps(), keep, safe):
                self._remove(step)

    def _remove(self, step: int) -> None:
        try:
            # The manifest goes first: a folder without one does not count as a save, so no moment shows half of one.
            (self.at(step) / "manifest.json").unlink()
        except OSError as error:
            raise CheckpointError(
                f"cannot remove the save {self.at(step)}: {_reason(error)}; mend the permissions, then `rung resume`"
            ) from error
        shutil.rmtree(self.at(step), ignore_errors=True)

    def sweep(self) -> None:
        """Removes what killed processes left behind. Only for the process that owns the run."""
        for path in self.folder.glob(".*.tmp"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(".*.part"):
            path.unlink(missing_ok=True)
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
    problem = problem_of(path)
    if problem is not None:
        raise CheckpointError(f"{problem}{_elsewhere(path)}")
    state = json.loads((path / "state.json").read_text("utf-8"))
    return Saved(path, _manifest(path)["step"], load_file(path / "model.safetensors"), state)


def problem_of(path: Path) -> str | None:
    """Compares every byte with the manifest; the first thing that is wrong, or None when the save is whole."""
    try:
        manifest = _manifest(path)
    except CheckpointError as error:
        return str(error)
    for name, spec in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{path} is damaged: {name} is missing"
        num_bytes = file.stat().st_size
        if num_bytes != spec["bytes"]:
            return f"{path} is damaged: {name} has {num_bytes} bytes, the manifest says {spec['bytes']}"
        found = sha256(file)
        if found != spec["sha256"]:
            return f"{path} is damaged: {name} has hash {found[:4]}.., the manifest says {spec['sha256'][:4]}.."
    return None


def read_state(path: Path) -> dict[str, Any]:
    """The numbers of a checkpoint alone, without its weights."""
    _manifest(path)
    state: dict[str, Any] = json.loads((path / "state.json").read_text("utf-8"))
    return state


def check_identity(saved: Saved, identity: Mapping[str, Any]) -> None:
    """Refuses weights whose numbers mean something else here: another vocabulary, another tokenizer."""
    before = saved.state.get("identity", {})
    differ = [name for name in {**before, **identity} if before.get(name) != identity.get(name)]
    if not differ:
        return
    # A list of names says more than the hash that changes with it.
    name = min(differ, key=lambda name: not _both_lists(before.get(name), identity.get(name)))
    raise CheckpointError(
        f"{saved.path} was trained with {_difference(name, before.get(name), identity.get(name))}; "
        "its weights would mean something else: use the data and the recipe it was trained with"
    )


def _both_lists(before: Any, after: Any) -> bool:
    return isinstance(before, list) and isinstance(after, list)


def _difference(name: str, before: Any, after: Any) -> str:
    """Of two lists the first place where they differ: whole ones would fill the screen."""
    if not _both_lists(before, after):
        was, now = (f"a list of {len(one)}" if isinstance(one, list) else one for one in (before, after))
        return f"{name} {was}, this config has {now}"
    pairs = itertools.zip_longest(before, after, fillvalue="nothing")
    place, (was, now) = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"{was} at place {place} of {name}, this config has {now} there ({len(before)} and {len(after)} in all)"


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
        raise CheckpointError(f"no checkpoint at {path} (it has no manifest.json)")
    try:
        manifest: dict[str, Any] = json.loads(file.read_text("utf-8"))
        for name in FILES:
            manifest["step"], manifest["files"][name]["bytes"], manifest["files"][name]["sha256"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path} is damaged: manifest.json cannot be read") from None
    return manifest


def _elsewhere(path: Path) -> str:
    """Names the newest other save of the run that is whole, if there is one."""
    if not path.name.isdigit():
        return ""
    saves = Checkpoints(path.parent)
    others = (step for step in reversed(saves.steps()) if step != int(path.name))
    whole = next((step for step in others if problem_of(saves.at(step)) is None), None)
    if whole is None:
        return "; there is no other whole save"
    return f"; the last whole save besides is {whole}: add `--at {whole}`, or name its folder"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"


def _os_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _reason(error: Exception) -> str:
    found = _os_error(error)
    return found.strerror if found is not None and found.strerror else " ".join(str(error).split())[:200]
