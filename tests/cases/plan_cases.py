"""Cases that a look at the plan, the inputs and the splits can tell before the first step."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from rung.config import key
from rung.doctor.preflight import briefly, inputs, leakage, plan, provenance, shift
from rung.doctor.preflight.result import Bench, Check
from rung.recipe import Batch, Draw, Input, Loss, Objective, Recipe, Stream
from tests.cases import tiny
from tests.cases.case import Ask, Case, Found
from tests.cases.running import setup_of
from tests.cases.tiny import Rows, Tiny, chain

SEVERITY = {"pass": "info", "skip": "info", "warn": "warn", "fail": "sick"}
ORDER = ("info", "warn", "sick")
PLAN = [check for check in plan.CHECKS if check not in provenance.CHECKS]
KEYS = [provenance.UNREAD, *(check for check in provenance.CHECKS if "keys" in check.name)]


def checked(recipe: type[Recipe], checks: Sequence[Check], *words: str, is_quick: bool = False) -> Ask:
    """What these checks say of a run that is ready to start, as severities by rule."""

    def ask(root: Path, seed: int) -> Found:
        bench = Bench(setup_of(recipe, f"seed={seed}", *words, root=root), is_quick)
        found: dict[str, str] = {}
        for check in checks:
            for result in check.look(bench):
                severity = SEVERITY[result.level]
                found[result.rule] = max(severity, found.get(result.rule, "info"), key=ORDER.index)
        return found

    return ask


@dataclass
class WithMore(tiny.Config):
    context_size: int = key(32, "Ids in a row; nothing reads it.", low=1)
    patience: int = key(3, "Read by nothing.", low=1)


class Forgetful(Tiny):
    Config = WithMore


def stream_of(seed: int, recipe: Tiny, copied: int = 0) -> Mapping[str, Stream]:
    """Rows of one chain for both sets, the eval set beginning with so many rows of train."""
    train, held = chain(recipe.cfg.num_rows, 10 * seed + 1), chain(recipe.cfg.num_eval, 10 * seed + 2)
    held[:copied] = train[50 : 50 + copied]
    return {"train": Rows("chain", ids=train), "val": Rows("chain/val", ids=held)}


class Apart(Tiny):
    def streams(self) -> Mapping[str, Stream]:
        return stream_of(self.seed, self)


class Leaky(Tiny):
    """As many rows of train in the eval set as a twentieth of it."""

    def streams(self) -> Mapping[str, Stream]:
        return stream_of(self.seed, self, max(3, self.cfg.num_eval // 20))


def film(num_frames: int, seed: int) -> np.ndarray:
    """(frames, 1, 16, 16, 3) bytes: a camera that wanders over a rough picture and never comes back."""
    rng = np.random.default_rng(seed)
    wide = rng.normal(size=(16, 2 * num_frames + 16))
    for _ in range(40):
        wide = (wide + np.roll(wide, 1, 1) + np.roll(wide, -1, 1) + np.roll(wide, 1, 0)) / 4
    wide = (wide - wide.mean()) / wide.std() * 50 + 128
    frames = np.stack([wide[:, 2 * t : 2 * t + 16] for t in range(num_frames)])
    frames = frames[:, None, :, :, None] + rng.normal(size=(num_frames, 1, 16, 16, 3))
    return np.clip(frames, 0, 255).astype(np.uint8)


class Net(nn.Module):
    """Predicts y from x and, unless it is deaf, from a control u."""

    def __init__(self, is_deaf: bool, width: int = 8) -> None:
        super().__init__()
        self.is_deaf = is_deaf
        self.net = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, width))

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        out: Tensor = self.net(torch.cat([x, u * 0 if self.is_deaf else u], -1))
        return out


class Steered(Tiny):
    """y = x turned by u: nothing can be said of y without u."""

    is_deaf = False
    scale = 1.0
    eval_scale = 1.0
    spoil: Callable[[dict[str, np.ndarray]], None] | None = None

    def streams(self) -> Mapping[str, Stream]:
        return {"train": self._rows(self.cfg.num_rows, 1, self.scale), "val": self._rows(256, 2, self.eval_scale)}

    def _rows(self, num_rows: int, part: int, scale: float) -> Rows:
        rng = np.random.default_rng(100 * self.seed + part)
        x, u = (rng.normal(size=(num_rows, 8)).astype(np.float32) for _ in range(2))
        arrays = {"x": x * np.float32(scale), "u": u, "y": np.tanh(x + 2 * u).astype(np.float32)}
        if self.spoil is not None and part == 1:
            type(self).spoil(arrays)  # type: ignore[misc]
        return Rows(f"steered/{part}", 8.0, **arrays)

    def model(self) -> nn.Module:
        return Net(self.is_deaf)

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def squares(batch: Batch, draw: Draw) -> Loss:
            error = (model(batch["x"], batch["u"]) - batch["y"]).square()
            return Loss(error.sum(), torch.tensor(float(error.numel())))

        return [Objective("squares", list(model.parameters()), squares)]

    def inputs(self) -> Sequence[Input]:
        return [Input("control", ["u"])]


class Deaf(Steered):
    is_deaf = True


class Bytes(Steered):
    """At evals the input has the range of bytes, in training that of units."""

    eval_scale = 255.0


def silence(arrays: dict[str, np.ndarray]) -> None:
    arrays["u"][:] = 0


def break_one(arrays: dict[str, np.ndarray]) -> None:
    arrays["x"][::20, 2] = np.nan


def deaden(arrays: dict[str, np.ndarray]) -> None:
    arrays["u"][:, 5] = 0.25


class Silent(Steered):
    spoil = silence


class Broken(Steered):
    spoil = break_one


class DeadChannel(Steered):
    spoil = deaden


class Huge(Steered):
    scale = eval_scale = 1e5


class Filmed(Steered):
    """Frames in order; the eval set is a block at the end, with a gap."""

    def split(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(number - 120), np.arange(number - 60, number)

    def streams(self) -> Mapping[str, Stream]:
        frames = film(480, self.seed)
        u = np.random.default_rng(self.seed).normal(size=(480, 8)).astype(np.float32)
        sets = dict(zip(("train", "val"), self.split(480)))
        return {name: Rows(f"film/{name}", 8.0, x=u[ids], u=u[ids], y=u[ids], frames=frames[ids])
                for name, ids in sets.items()}  # fmt: skip


class FilmedByFrame(Filmed):
    """Every eighth frame is held out, between its neighbours."""

    def split(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        held = np.arange(number) % 8 == 3
        return np.flatnonzero(~held), np.flatnonzero(held)


def repository(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "recipe.py").write_text("answer = 42\n")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    return root


def in_repository(edit: bool) -> Ask:
    def ask(root: Path, seed: int) -> Found:
        from contextlib import chdir

        folder = repository(root / f"code-{seed}")
        if edit:
            (folder / "recipe.py").write_text("answer = 43\n")
        bench = Bench(setup_of(Tiny, root=root))
        with chdir(folder):
            return {r.rule: SEVERITY[r.level] for r in provenance.uncommitted_code(bench)}

    return ask


HELD_OUT = leakage.CHECKS
SHORT = "lr.lr_decay_iters=1000", "optimizer.max_iters=200"

CASES = [
    Case("O10", "cosine over 1000, trained for 200", checked(Tiny, PLAN, *SHORT),
         checked(Tiny, PLAN, "optimizer.max_iters=200"), is_quick=True),
    Case("O10", "warm-up of half the run", checked(Tiny, PLAN, "lr.warmup_iters=75"),
         checked(Tiny, PLAN, "lr.warmup_iters=15"), is_quick=True),
    Case("O10", "floor long before the end", checked(Tiny, PLAN, "lr.lr_decay_iters=75"),
         checked(Tiny, PLAN, "lr.schedule=constant", "lr.lr_decay_iters=75"), is_quick=True),
    Case("O10", "schedule that does nothing", checked(Tiny, PLAN, "lr.min_lr=3e-3"),
         checked(Tiny, PLAN, "lr.min_lr=3e-4"), is_quick=True),
    Case("O10", "wsd that drops in a step", checked(Tiny, PLAN, "lr.schedule=wsd", "lr.wsd_decay_fraction=0.01"),
         checked(Tiny, PLAN, "lr.schedule=wsd"), is_quick=True),
    Case("R1", "a key that nothing reads", checked(Forgetful, KEYS, "patience=5"), checked(Forgetful, KEYS),
         is_quick=True),
    Case("R2", "an edited file", in_repository(True), in_repository(False), is_quick=True),
    Case("E7", "a twentieth of the eval rows are of train", checked(Leaky, HELD_OUT), checked(Apart, HELD_OUT),
         is_quick=True),
    Case("E7", "a film split frame by frame", checked(FilmedByFrame, HELD_OUT), checked(Filmed, HELD_OUT),
         is_quick=True),
    Case("C1", "a control that is multiplied by 0", checked(Deaf, briefly.CHECKS), checked(Steered, briefly.CHECKS)),
    Case("D4", "bytes at evals, units in training", checked(Bytes, shift.CHECKS), checked(Steered, shift.CHECKS),
         is_quick=True),
    *(Case("D4", what, checked(sick, inputs.CHECKS[:1]), checked(Steered, inputs.CHECKS[:1]), is_quick=True)
      for what, sick in {"a silent input": Silent, "an input that is not finite": Broken, "a dead channel": DeadChannel,
                         "an input of huge scale": Huge}.items()),
]  # fmt: skip
