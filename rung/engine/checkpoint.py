"""Saves and restores a run.

    checkpoints/<step>/model.safetensors   weights and buffers, each tensor once however many names it has
    checkpoints/<step>/optimizer.pt        optimizers and scaler; loads with weights_only=True
    checkpoints/<step>/state.json          numbers, identity of the recipe, config, fingerprints of what is frozen
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
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rung import parse
from rung.engine.fingerprints import fingerprint, unchanged
from rung.engine.state import Progress, State
from rung.errors import CheckpointError
from rung.files import sha256, sync, write_whole
from rung.runs import marks
from rung.runs.files import locked, newer
from rung.runs.paths import inside

SCHEMA = 1  # of a save; raise it when an older reader would misread one
_MANIFEST = {"schema": int, "step": int, "files": {"*": {"bytes": int, "sha256": str}}}
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
                f"cannot write {self.folder / name}: {_reason(error)}; the saves are untouched; make room or fix the "
                "permissions, then `rung resume` the run",
                code="cannot-write",
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
            weights = canonical(state.model)
            frozen = unchanged(weights, state.frozen)
            written = {name: tensor.contiguous() for name, tensor in weights.items() if name not in frozen}
            save_file(written, beside / "model.safetensors")
            with (beside / "optimizer.pt").open("wb") as file:  # given a path, torch.save hides what the disk said
                torch.save(state.tensors(), file)
            numbers = {"progress": asdict(state.progress), "frozen": frozen, **extra}
            (beside / "state.json").write_text(json.dumps(numbers, indent=1), "utf-8")
            files = {name: {"bytes": (beside / name).stat().st_size, "sha256": sha256(beside / name)} for name in FILES}
            manifest = {"schema": SCHEMA, "step": step, "files": files}
            (beside / "manifest.json").write_text(json.dumps(manifest, indent=1), "utf-8")
            for name in (*FILES, "manifest.json"):
                sync(beside / name)
            sync(beside)
            os.rename(beside, final)
            sync(self.folder)
        except Exception as error:
            shutil.rmtree(beside, ignore_errors=True)
            # torch.save raises something of its own after the OSError; safetensors only quotes it
            if _os_error(error) is None and "os error" not in str(error).lower():
                raise
            raise CheckpointError(
                f"step {step} could not be saved in {self.folder}: {_reason(error)}; earlier saves are untouched; "
                "make room or fix the permissions, then `rung resume` the run",
                code="cannot-write",
            ) from error
        return final

    def set_aside(self, after: int) -> list[int]:
        """Moves saves later than a step to checkpoints/aside-<n>/, where they can be loaded by path but count no more.

        A run that continues from an earlier step has another future.
        """
        later = [step for step in self.steps() if step > after]
        if not later:
            return []
        try:
            taken = [path.name.removeprefix("aside-") for path in self.folder.glob("aside-*")]
            place = self.folder / f"aside-{1 + max((int(name) for name in taken if name.isdecimal()), default=0)}"
            place.mkdir()
            for step in later:
                os.rename(self.at(step), place / self.at(step).name)
        except OSError as error:
            raise CheckpointError(
                f"cannot set aside the saves after {after} in {self.folder}: {_reason(error)}", code="cannot-write"
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
                f"cannot remove the save {self.at(step)}: {_reason(error)}; fix the permissions, then `rung resume`",
                code="cannot-write",
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
    """Steps to delete so that `keep` are left, not counting the protected ones; 0 keeps all, the last always stays."""
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

    def load_into(self, model: nn.Module, is_new_run: bool = False) -> list[str]:
        """Fills a model, whose frozen part must be the one that these weights were trained beside.

        A new run may begin beside another one; the names of the tensors that differ are returned.
        """
        own, frozen = canonical(model), self.state.get("frozen", {})
        same = unchanged(own, frozen)
        differ = [name for name in frozen if name in own and name not in same]
        if differ and not is_new_run:
            here = fingerprint(own[differ[0]])
            raise CheckpointError(
                f"{self.path} was trained beside other frozen weights: {differ[0]} was {frozen[differ[0]]}, here it is "
                f"{here} ({len(differ)} of {len(frozen)} tensors differ); a save does not hold them: restore the files "
                "that the recipe loads them from, or start a new run with init_from",
                code="checkpoint-mismatch",
            )
        load_weights(model, self.weights, self.path, frozen)
        return differ

    def tensors(self) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(self.path / "optimizer.pt", map_location="cpu", weights_only=True)
        return loaded


def load(path: Path) -> Saved:
    """Reads a checkpoint after checking every byte of it."""
    file = path / "manifest.json"
    problem = problem_of(path)
    if problem is not None:
        # Names the newest other save of the run that is whole, if there is one.
        if path.name.isdigit():
            saves = Checkpoints(path.parent)
            others = (step for step in reversed(saves.steps()) if step != int(path.name))
            whole = next((step for step in others if problem_of(saves.at(step)) is None), None)
            remedy = f"the last other whole save is {whole}: add `--at {whole}`, or name its folder"
            problem += "; there is no other whole save" if whole is None else f"; {remedy}"
        code = "checkpoint-damaged" if file.is_file() else "no-checkpoint"
        if "newer rung" in problem:
            code = "version-mismatch"
        raise CheckpointError(problem, code=code)
    step = parse.loose_json(parse.read_bytes(file))["step"]
    state = parse.loose_json(parse.read_bytes(path / "state.json"))
    return Saved(path, step, load_file(path / "model.safetensors"), state)


def problem_of(path: Path) -> str | None:
    """Compares every byte with the manifest; the first thing that is wrong, or None when the save is whole."""
    file = inside(path, "manifest.json")
    if not file.is_file():
        return f"no checkpoint at {path} (it has no manifest.json)"
    try:
        manifest: dict[str, Any] = parse.loose_json(parse.read_bytes(file))
        if problem := newer(path, manifest, SCHEMA):
            return problem
        for name in FILES:
            manifest["step"], manifest["files"][name]["bytes"], manifest["files"][name]["sha256"]
        if problem := parse.mismatch(manifest, _MANIFEST, "it"):
            raise ValueError(problem)
        if not isinstance(manifest["step"], int):  # files are named after it
            raise ValueError("no step")
    except (OSError, ValueError, KeyError, TypeError):
        return f"{path} is damaged: manifest.json cannot be read"
    for name, spec in manifest["files"].items():
        file = inside(path, name)
        if not file.is_file():
            return f"{path} is damaged: {name} is missing"
        num_bytes = file.stat().st_size
        if num_bytes != spec["bytes"]:
            return f"{path} is damaged: {name} has {num_bytes} bytes, the manifest says {spec['bytes']}"
        found = sha256(file)
        if found != spec["sha256"]:
            return f"{path} is damaged: {name} has hash {found[:4]}.., the manifest says {spec['sha256'][:4]}.."
    return None


def check_identity(saved: Saved, identity: Mapping[str, Any]) -> None:
    """Refuses weights whose numbers mean something else here: another vocabulary, another tokenizer."""
    before = saved.state.get("identity", {})
    differ = [name for name in {**before, **identity} if before.get(name) != identity.get(name)]
    if not differ:
        return
    # A list of names says more than the hash that changes with it.
    lists = [name for name in differ if isinstance(before.get(name), list) and isinstance(identity.get(name), list)]
    if lists:  # the first place where they differ: whole ones would fill the screen
        old, new = before[lists[0]], identity[lists[0]]
        pairs = enumerate(itertools.zip_longest(old, new, fillvalue="nothing"))
        place, (was, now) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
        what = f"{was} at place {place} of {lists[0]}, this config has {now} there ({len(old)} and {len(new)} in all)"
    else:
        values = (before.get(differ[0]), identity.get(differ[0]))
        was, now = (f"a list of {len(one)}" if isinstance(one, list) else one for one in values)
        what = f"{differ[0]} {was}, this config has {now}"
    raise CheckpointError(
        f"{saved.path} was trained with {what}; its weights would mean something else: use the data and the recipe it "
        "was trained with",
        code="checkpoint-mismatch",
    )


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], where: Path, frozen: Collection[str] = ()) -> None:
    """Copies weights into a model whose tensors must have the same names and shapes; the model keeps its dtype.

    Those named in `frozen` may be missing from the weights: then the model keeps its own.
    """
    own = canonical(model)
    missing = [name for name in own if name not in weights and name not in frozen]
    extra = [name for name in (*weights, *frozen) if name not in own]
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"has {extra[0]}, which this model does not"
        raise CheckpointError(
            f"{where} is of another model: it {what} ({len(missing)} missing, {len(extra)} extra); "
            "use the model section of its own config",
            code="checkpoint-mismatch",
        )
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            there, here = ("x".join(map(str, t.shape)) or "a scalar" for t in (tensor, own[name]))
            raise CheckpointError(
                f"{where} is of another shape: {name} is {there} there and {here} here; use the model section of its "
                "own config",
                code="checkpoint-mismatch",
            )
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)


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


def _os_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _reason(error: Exception) -> str:
    found = _os_error(error)
    return found.strerror if found is not None and found.strerror else " ".join(str(error).split())[:200]
