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
from rung.doctor.preflight import inputs, leakage, plan, provenance
from rung.doctor.preflight.copies import inputs_are_used
from rung.doctor.preflight.leakage import frames_apart
from rung.doctor.preflight.rehearsal import unread_keys
from rung.doctor.preflight.result import Check, CheckContext
from rung.random import Draw
from rung.recipe import Batch, Input, Loss, Objective, ParameterGroup, Recipe, Stream
from tests.cases import statistics as stat
from tests.cases import tiny
from tests.cases.case import Ask, Case, Seen
from tests.cases.running import setup_of
from tests.cases.statistics import FACT
from tests.cases.tiny import Rows, Tiny, chain

SEVERITY = {"pass": "info", "skip": "info", "warn": "warn", "fail": "sick"}
ORDER = ("info", "warn", "sick")
PLAN = [plan.schedule_against_budget, plan.warm_up, plan.shape_of_rate]
KEYS = [unread_keys, provenance.twin_keys]


def checked(recipe: type[Recipe], checks: Sequence[Check], *overrides: str, is_quick: bool = False) -> Ask:
    """What these checks say of a run that is ready to start, as severities by rule."""

    def ask(root: Path, seed: int) -> Seen:
        context = CheckContext(setup_of(recipe, f"seed={seed}", *overrides, root=root), is_quick)
        found: dict[str, str] = {}
        for check in checks:
            for result in check(context):
                severity = SEVERITY[result.level]
                rule = result.rule or ""
                found[rule] = max(severity, found.get(rule, "info"), key=ORDER.index)
        return Seen(found, context)

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

        return [Objective("squares", [ParameterGroup("all", model.parameters())], squares)]

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


class Augmented(Rows):
    """Ids are replaced at random, in training and at evals."""

    def gather(self, ids: np.ndarray, draw: Draw) -> dict[str, np.ndarray]:
        rows = super().gather(ids, draw)["ids"]
        return {"ids": np.where(draw.uniform("replace", rows.shape[1]) < 0.1, 0, rows)}


class LeakyAugmented(Leaky):
    def streams(self) -> Mapping[str, Stream]:
        streams = super().streams()
        return {name: Augmented(name, **rows.arrays) for name, rows in streams.items() if isinstance(rows, Rows)}


class ApartAugmented(LeakyAugmented):
    def streams(self) -> Mapping[str, Stream]:
        streams = Apart.streams(self)  # type: ignore[arg-type]
        return {name: Augmented(name, **rows.arrays) for name, rows in streams.items() if isinstance(rows, Rows)}


class Clips(Filmed):
    """Three frames in a row; clips are shuffled before they are split, or split and then cut."""

    is_shuffled = False

    def streams(self) -> Mapping[str, Stream]:
        frames, rng = film(480, self.seed)[:, 0], np.random.default_rng(self.seed)
        order = rng.permutation(470) if self.is_shuffled else np.r_[:400, 410:470]
        u = rng.normal(size=(480, 8)).astype(np.float32)
        sets = {"train": order[:400], "val": order[400:]}
        clips = frames[np.arange(470)[:, None] + np.arange(3)]
        return {name: Rows(f"clips/{name}", 8.0, x=u[ids], u=u[ids], y=u[ids], frames=clips[ids])
                for name, ids in sets.items()}  # fmt: skip


class ShuffledClips(Clips):
    is_shuffled = True


def quieten(arrays: dict[str, np.ndarray]) -> None:
    arrays["u"] *= np.geomspace(2e-4, 7e-3, 8).astype(np.float32)


def empty(arrays: dict[str, np.ndarray]) -> None:
    arrays["x"][2:] = 0


class Quiet(Steered):
    spoil = quieten


class Emptied(Steered):
    spoil = empty


def repository(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "recipe.py").write_text("answer = 42\n")
    for args in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *args], cwd=root, check=True)
    return root


def in_repository(edit: bool) -> Ask:
    def ask(root: Path, seed: int) -> Seen:
        from contextlib import chdir

        folder = repository(root / f"code-{seed}")
        if edit:
            (folder / "recipe.py").write_text("answer = 43\n")
        context = CheckContext(setup_of(Tiny, root=root))
        with chdir(folder):
            return Seen({r.rule or "": SEVERITY[r.level] for r in provenance.uncommitted_code(context)})

    return ask


HELD_OUT = [leakage.leakage, frames_apart]
INPUTS, SHIFTED, USED = [inputs.sound_inputs], [inputs.same_as_in_training], [inputs_are_used]
SHORT = "lr.lr_decay_iters=1000", "optimizer.max_iters=200"

CASES = [
    Case("O10", "cosine over 1000, trained for 200", checked(Tiny, PLAN, *SHORT),
         checked(Tiny, PLAN, "optimizer.max_iters=200"), is_quick=True, statistic=FACT),
    Case("O10", "warm-up of half the run", checked(Tiny, PLAN, "lr.warmup_iters=75"),
         checked(Tiny, PLAN, "lr.warmup_iters=15"), is_quick=True, statistic=FACT),
    Case("O10", "floor long before the end", checked(Tiny, PLAN, "lr.lr_decay_iters=75"),
         checked(Tiny, PLAN, "lr.schedule=constant", "lr.lr_decay_iters=75"), is_quick=True, statistic=FACT),
    Case("O10", "schedule that does nothing", checked(Tiny, PLAN, "lr.min_lr=3e-3"),
         checked(Tiny, PLAN, "lr.min_lr=3e-4"), is_quick=True, statistic=FACT),
    Case("O10", "wsd that drops in a step", checked(Tiny, PLAN, "lr.schedule=wsd", "lr.wsd_decay_fraction=0.01"),
         checked(Tiny, PLAN, "lr.schedule=wsd"), is_quick=True, statistic=FACT),
    Case("R1", "a key that nothing reads", checked(Forgetful, KEYS, "patience=5"), checked(Forgetful, KEYS),
         is_quick=True, statistic=FACT),
    Case("R2", "an edited file", in_repository(True), in_repository(False), is_quick=True, statistic=FACT),
    Case("E7", "a twentieth of the eval rows are of train", checked(Leaky, HELD_OUT), checked(Apart, HELD_OUT),
         is_quick=True, statistic=stat.of(stat.duplicates)),
    Case("E7", "a film split frame by frame", checked(FilmedByFrame, HELD_OUT), checked(Filmed, HELD_OUT),
         is_quick=True, statistic=stat.near_frames(spread=(0.081, 0.033))),
    Case("E7", "a twentieth, hidden behind augmentation", checked(LeakyAugmented, [leakage.leakage]),
         checked(ApartAugmented, [leakage.leakage]), is_quick=True, statistic=FACT),
    Case("E7", "clips shuffled before the split", checked(ShuffledClips, [leakage.leakage]),
         checked(Clips, [leakage.leakage]), is_quick=True, statistic=FACT),
    Case("C1", "a control that is multiplied by 0", checked(Deaf, USED), checked(Steered, USED),
         statistic=stat.of(stat.input_used_briefly)),
    Case("D4", "bytes at evals, units in training", checked(Bytes, SHIFTED), checked(Steered, SHIFTED),
         is_quick=True, statistic=stat.of(stat.input_shift)),
    *(Case("D4", what, checked(sick, INPUTS), checked(Steered, INPUTS), is_quick=True,
           statistic=FACT)
      for what, sick in {"a silent input": Silent, "an input that is not finite": Broken,
                         "a dead channel": DeadChannel, "channels of small deviations": Quiet,
                         "rows that are empty": Emptied}.items()),
    Case("D4", "an input of huge scale", checked(Huge, INPUTS), checked(Steered, INPUTS),
         is_quick=True, statistic=stat.of(stat.input_scale)),
]  # fmt: skip
