"""What watching a run costs: `fit` with all signals and the doctor on, with the latch alone, and with neither.

everything: the defaults. Norms per tensor every 20 steps, a look at activations every 100, armed updates after the
start and after spikes, the doctor beside the run. latch: the judgement of each step and the row that it leaves in the
record, and nothing else. bare: the same loop with an update that judges nothing, whose numbers nobody reads, without a
record. So `everything` is bare / everything in seconds, and `latch` is bare / latch: 1 would be for free.

The three take 20 steps each, in turns, in one process, every party in a thread of its own that waits while others
have the device. A figure is of 100 steps, so that norms and looks are in it in their true share; the first 50 steps,
in which every update is checked and measured, are left out. Turns change at steps 50, 70, 90 ..: at 60 and 80, when
norms are taken, the device has work in its queue as in any run, and at the beginning of a turn it has none. Probes
belong to evals, of which there are none here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rung.bench.throughput import STEPS, Gpt, Spent, now, plain_piano, record_of, since, wait_for
from rung.config import Layer, Schema
from rung.doctor.live import live_doctor
from rung.engine.build import Setup, build
from rung.engine.config import Engine
from rung.engine.guarded import ClippedGrads, GuardedStep
from rung.engine.loop import fit
from rung.engine.optim import set_lr
from rung.engine.recorder import Recorder
from rung.engine.signals import Arrived, Signals
from rung.recipes.piano.recipe import Piano
from rung.runs.record import Record

OFF: dict[str, Any] = {
    "signals": {"layers_every": 0, "activation_stats_every": 0, "probes": False, "doctor": False},
    "guard": {"armed_steps": 0},
}
PARTIES = {"everything": {}, "latch": OFF, "bare": OFF}


class Done(BaseException):
    """Enough. Not an Exception, which a run would take for a step that failed."""


class Mute:
    def step(self, step: int, row: Mapping[str, float]) -> None: ...
    def eval(self, step: int, results: Mapping[str, Mapping[str, float]], is_best: bool) -> None: ...
    def say(self, text: str) -> None: ...


class Unguarded(GuardedStep):
    """Applies what comes."""

    def _update(self, ready: Sequence[ClippedGrads], lr: float | None) -> dict[str, Tensor]:
        for one in ready:
            set_lr(one.of.objective.optimizers, lr or 0.0)
            for optimizer in one.of.objective.optimizers:
                optimizer.step()
        return {"skipped": self.guard.latch}


class Unread(Signals):
    """Nobody reads what a step leaves behind."""

    def push(self, *row: Any) -> None: ...

    def ready(self, wait: bool = False) -> Iterator[Arrived]:
        return iter(())


class Turns:
    """Who may run: one after the other, for a chunk of steps each."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._turn = list(names), 0
        self._changed = threading.Condition()
        self.error: BaseException | None = None

    def wait_for(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or self._names[self._turn] == name)
        if self.error is not None:
            raise Done

    def pass_on(self, error: BaseException | None = None) -> None:
        with self._changed:
            self._turn = (self._turn + 1) % len(self._names)
            self.error = self.error or error
            self._changed.notify_all()


@dataclass
class Party:
    """A run that stops at every chunk and waits for its turn."""

    name: str
    setup: Setup
    record: Record | None
    chunk: int
    num_chunks: int
    until: int  # the step at which the first chunk ends
    spent: list[Spent] = field(default_factory=list)  # of a step, by chunk

    def run(self, turns: Turns) -> None:
        error: BaseException | None = None
        try:
            turns.wait_for(self.name)
            self._hold_between_chunks(turns)
            watch = live_doctor(self.record.path) if self.record is not None and self.name == "everything" else None
            fit(self.setup, self.record, Mute(), watch)
        except Done:
            pass
        except BaseException as raised:
            error = raised
        turns.pass_on(error)
        if self.record is not None:
            self.record.finish("stopped")

    def _hold_between_chunks(self, turns: Turns) -> None:
        take, device = self.setup.stepper.step, self.setup.world.device
        num_steps, first, begun = 0, 0, now()

        def step(*words: Any) -> dict[str, Tensor]:
            nonlocal num_steps, first, begun
            if num_steps == self.until:
                wait_for(device)
                self.spent.append(since(begun, num_steps - first))
                if len(self.spent) == self.num_chunks:
                    raise Done
                turns.pass_on()
                turns.wait_for(self.name)
                first, self.until, begun = num_steps, num_steps + self.chunk, now()
            num_steps += 1
            return take(*words)

        self.setup.stepper.step = step  # type: ignore[method-assign,assignment]


def built(
    folder: Path, name: str, size: str, device: str, threads: int, batch: int | None
) -> tuple[Setup, Record | None]:
    tree: dict[str, Any] = {
        "system": {"device": device, "threads": threads},
        "optimizer": {"max_iters": STEPS},
        "eval_interval": 0,
        "checkpoint": {"every": 0},
        **PARTIES[name],
    }
    layers, recipe_class = [Layer("bench", tree)], Piano if size == "piano" else Gpt
    if size == "piano":
        layers.insert(0, plain_piano())
        tree["dataset"] = {"base_dataset_name": str(folder / "ids")}
    else:
        tree["store"] = str(folder / "ids")
        tree["system"] |= {"dtype": "bfloat16", "compile": True}
    if batch is not None or size == "gpt2":
        tree["data"] = {"batch_size": batch or 64}
    schema = Schema({"engine": Engine, "recipe": recipe_class.Config})
    setup = build(schema.resolve(layers), recipe_class, folder / "runs")
    if name == "bare":
        setup.stepper.guarded.__class__ = Unguarded
        setup.stepper.guarded._signals = Unread()
        return setup, None
    return setup, record_of(folder, name, setup)


def compete(parties: Sequence[Party]) -> None:
    turns = Turns([p.name for p in parties])
    # The doctor looks every so many seconds: of its own run, not of the three.
    kept, Recorder.DOCTOR_S = Recorder.DOCTOR_S, Recorder.DOCTOR_S * len(parties)
    threads = [threading.Thread(target=p.run, args=(turns,), name=p.name, daemon=True) for p in parties]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        Recorder.DOCTOR_S = kept
    if turns.error is not None:
        raise turns.error


def rounds_of(spent: Sequence[Spent], per_round: int) -> list[Spent]:
    """Means over as many chunks as make a figure."""
    groups = [spent[start : start + per_round] for start in range(0, len(spent), per_round)]
    return [Spent(*(sum(part) / len(group) for part in zip(*group))) for group in groups]
