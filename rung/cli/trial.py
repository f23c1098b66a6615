"""The runs of an A/B: which ones it needs, which are there already, and what to type for the rest.

A run counts for an arm when it has finished or diverged and equals what would be trained now: config, code as it lies
here, packages, data. Otherwise it is trained, or gone on with. What is concluded is left to compare.judge.

The surprising thing: the present code is kept for a moment, as for a run, and let go again: only so can it be told
whether an earlier run had the same.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from rung.errors import RunError, UserError
from rung.runs.query import Run, list_runs, ref
from rung.runs.record import amend

if TYPE_CHECKING:
    from rung.cli.resolve import Resolved

STOPPED = (130, 143, -2, -15)  # exit codes of a training that was interrupted, and saved
_NUM_TOLD = 30  # lines of a training that failed
_ENVIRONMENT = ("python", "implementation", "packages", "rung_sha256", "gpus")


class Horizon(NamedTuple):
    """How far a config trains: steps, targets in all, and where its schedule ends as a share of the steps."""

    num_steps: int | None
    targets: float
    decay_share: float


@dataclass(frozen=True)
class Arm:
    """One side of an A/B: what is added to the config of the base run."""

    name: str  # control or variant
    words: tuple[str, ...]
    resolved: Resolved

    def tree(self, seed: int) -> dict[str, Any]:
        return {**self.resolved.config.tree(), "seed": seed}


@dataclass
class Trial:
    """An A/B of one base run. `id` is the same whenever the same question is asked."""

    base: Run
    root: Path
    arms: list[Arm]
    seeds: list[int]
    experiment: str
    why: str
    declared: str | None = None
    now: dict[str, Any] = field(default_factory=dict)  # code, environment and data as they are here

    @property
    def id(self) -> str:
        asked = [str(self.base.document.get("uid") or self.base.id), *sorted(self.arms[-1].words), self.declared or ""]
        return hashlib.sha256("\n".join(asked).encode()).hexdigest()[:10]

    def places(self) -> Iterator[tuple[Arm, int]]:
        """Seed by seed, so that what is there when somebody stops is made of whole pairs."""
        for seed in self.seeds:
            for arm in self.arms:
                yield arm, seed

    def command(self, arm: Arm, seed: int, run: Run | None) -> list[str]:
        """What to type for a run that is not there, or not at its end."""
        rung = [sys.executable, "-m", "rung"]
        if run is not None:
            return [*rung, "resume", str(run.path), "--runs", str(self.root)]
        return [
            *rung, "train", "--from", str(self.base.path), f"seed={seed}", *arm.words, "--experiment", self.experiment,
            "--why", self.why, "--tag", f"ab={self.id}", "--runs", str(self.root),
        ]  # fmt: skip

    def find(self) -> dict[tuple[str, int], Run | None]:
        """Arm and seed -> the run that serves there: one at its end before one to go on with, the newest before older
        ones."""
        there = [self.base, *reversed(list_runs(self.root, None, []))]
        return {(arm.name, seed): self._find(arm, seed, there) for arm, seed in self.places()}

    def _find(self, arm: Arm, seed: int, there: Sequence[Run]) -> Run | None:
        fit = [run for run in there if self._is_fit(run, arm, seed)]
        ended = [run for run in fit if run.status in ("finished", "diverged")]
        return next(iter([*ended, *fit]), None)

    def is_unmarked(self, run: Run) -> bool:
        return f"ab={self.id}" in (run.document.get("tags") or []) and not run.document.get("ab")

    def made(self) -> list[Run]:
        """Every run that was started for this question, oldest first."""
        tag = f"ab={self.id}"
        runs = [run for run in list_runs(self.root, None, []) if tag in (run.document.get("tags") or [])]
        return sorted(runs, key=lambda run: str(run.document.get("created")))

    def mark(self, arm: Arm, runs: Sequence[Run]) -> None:
        """Says in run.json which arm a run is of. A run without it, after a crash, still has the tag."""
        for run in runs:
            of = {"id": self.id, "arm": arm.name, "base": self.base.id, "overrides": list(arm.words)}
            amend(run.path, ab=of)

    def _is_fit(self, run: Run, arm: Arm, seed: int) -> bool:
        if run.document.get("recipe") != self.base.document.get("recipe") or run.document.get("seed") != seed:
            return False
        if run.status not in ("finished", "diverged", "running") and not run.checkpoints():
            return False
        try:
            if _learning(run.config()) != _learning(arm.tree(seed)):
                return False
            if self.declared == "code" and arm.name == "control":  # the old code cannot be had here
                return _code_of(run.document.get("code")) == _code_of(self.base.document.get("code"))
            env, data = run.environment(), run.data()
        except RunError:
            return False
        return (
            _code_of(run.document.get("code")) == self.now["code"]
            and {name: env.get(name) for name in _ENVIRONMENT} == self.now["environment"]
            and {name: (data.get(name) or {}).get("fingerprint") for name in data} == self.now["data"][arm.name]
        )


def take_stock(trial: Trial) -> dict[str, Any]:
    """Code, environment and data of a run that would be started here and now."""
    from rung.runs.environment import environment

    env = environment()
    return {
        "code": _code_of(_code_here(trial.root)),
        "environment": {name: env.get(name) for name in _ENVIRONMENT},
        "data": {arm.name: {n: s.fingerprint for n, s in streams_of(arm.resolved).items()} for arm in trial.arms},
    }


def streams_of(resolved: Resolved) -> Mapping[str, Any]:
    cfg = resolved.config.view("engine")
    return resolved.recipe_class(resolved.config.view("recipe"), cfg.seed).streams()


def horizon(resolved: Resolved) -> Horizon:
    from rung.engine.budget import Rate

    cfg, train = resolved.config.view("engine"), streams_of(resolved)["train"]
    rows = cfg.data.batch_size * cfg.optimizer.gradient_accumulation_steps
    rate = Rate(rows, train.num_rows, train.targets_per_row)
    num_steps, decay = rate.steps(cfg.optimizer.max_iters), rate.steps(cfg.lr.lr_decay_iters) or 0
    return Horizon(num_steps, (num_steps or 0) * rows * train.targets_per_row, decay / num_steps if num_steps else 0.0)


def refuse_other_horizon(base: Run, control: Resolved, variant: Resolved) -> None:
    """A change that also moves the budget is two changes; said before anything is trained."""
    a, b = horizon(control), horizon(variant)
    if a.num_steps is None or b.num_steps is None:
        raise UserError(
            f"{base.id} has a budget in time alone, by which the faster arm trains longer; train a base with "
            "optimizer.max_iters in steps or tokens (--allow budget tries it all the same)"
        )
    one_step = max(a.targets / a.num_steps, b.targets / b.num_steps) if a.num_steps and b.num_steps else 0.0
    if abs(a.targets - b.targets) > one_step:
        budgets = [resolved.config.values["optimizer.max_iters"] for resolved in (control, variant)]
        if budgets[0] == budgets[1]:
            remedy = (
                "give the budget in tokens, so that both arms see as many: train a new base with "
                f"`rung train --from {ref(base.path, base.id)} optimizer.max_iters='{a.targets:.0f} tokens'`"
            )
        else:
            remedy = "a longer run is not compared with a shorter one: leave optimizer.max_iters alone"
        raise UserError(
            f"the change also moves the budget: {a.targets:.0f} targets in {a.num_steps} steps of the control, "
            f"{b.targets:.0f} in {b.num_steps} of the variant; {remedy} (--allow budget tries it all the same)"
        )
    if abs(a.decay_share - b.decay_share) > 2 / min(a.num_steps, b.num_steps):
        raise UserError(
            f"the change also moves the end of the schedule: at {a.decay_share:.0%} of the control's steps, at "
            f"{b.decay_share:.0%} of the variant's; set lr.lr_decay_iters so that both end alike (--allow budget "
            "tries it all the same)"
        )


def changed_keys(control: Resolved, variant: Resolved) -> list[str]:
    """Keys that the variant changes and that may change what is learned, without those that only follow another."""
    from rung.config import differences

    found = differences(_learning(control.config.tree()), _learning(variant.config.tree()))
    follows = [name for name in found if variant.config.sources.get(name, "").startswith("derived")]
    return [name for name in found if name not in follows]


def follow(command: Sequence[str], is_quiet: bool, is_verbose: bool = False) -> int:
    """Runs a training. Ctrl-C reaches it as well as us: it saves and stops, and we wait.

    Its output is shown where `is_verbose`; else its last line, in place, on a terminal, and the end of it all where the
    training fails. With `is_quiet` all of it goes to the error output.
    """
    out = sys.stderr if is_quiet else sys.stdout
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: FrameType | None) -> None:
        if child is not None and number == signal.SIGTERM:
            child.terminate()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if is_verbose:
            child = subprocess.Popen(command, stdout=sys.stderr.fileno() if is_quiet else None)
            return child.wait()
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        told = _watch(child, out)
        code = child.wait()
        if code not in (0, *STOPPED):
            print(*told, sep="\n", file=sys.stderr, flush=True)
        return code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(child: subprocess.Popen[bytes], out: TextIO) -> list[str]:
    """Reads what a training prints until it ends, and returns the last of it."""
    from rung.text import printable

    told: deque[str] = deque(maxlen=_NUM_TOLD)
    assert child.stdout is not None
    is_live = out.isatty()
    for raw in child.stdout:
        told.append(printable(raw.decode(errors="replace").rstrip()))
        if is_live and told[-1]:
            width = shutil.get_terminal_size().columns - 1
            out.write(f"\r\x1b[K{told[-1][:width]}")
            out.flush()
    if is_live:
        out.write("\r\x1b[K")
        out.flush()
    return list(told)


def _learning(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The config without keys that do not change what is learned."""
    from rung.compare.factors import NO_LEARNING
    from rung.config import differences

    flat = {name: after for name, (_, after) in differences({}, tree).items()}
    return {name: value for name, value in flat.items() if not name.startswith(NO_LEARNING)}


def _code_of(code: Any) -> str | None:
    """What names the code of a run: equal names are equal code."""
    found = code if isinstance(code, dict) else {}
    return next((str(found[name]) for name in ("tree", "sha256") if found.get(name)), None)


def _code_here(root: Path) -> dict[str, Any]:
    from rung.runs.provenance import WorkingTree, snapshot

    here = Path.cwd().resolve()
    with tempfile.TemporaryDirectory(prefix="rung-ab-") as folder:
        code = snapshot(here, Path(folder), f"ab-now/{os.getpid()}", [root.resolve()])
        tree = WorkingTree.find(here) if code.get("kind") == "git" else None
        if tree is not None:
            tree.git("update-ref", "-d", str(code["ref"]), check=False)
    return code
