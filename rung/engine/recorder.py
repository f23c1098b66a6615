"""The recorder: writes a run's rows, events, saves and samples, shows them, and asks the doctor. It decides nothing."""

from __future__ import annotations

import hashlib
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rung.engine.activations import ActivationStats
from rung.engine.build import Setup
from rung.engine.checkpoint import Checkpoints
from rung.engine.clock import Clock
from rung.engine.flops import row_shapes
from rung.engine.gpu import gpu_state
from rung.engine.guarded import Row
from rung.engine.prefetch import Micro
from rung.engine.probes import ProbeError, probe
from rung.engine.purity import Changes, named, pure
from rung.engine.signals import Layered
from rung.errors import UserError
from rung.random import Draw
from rung.runs.record import Record
from rung.text import error_text

MOST_ROWS = 50_000_000  # of an epoch, of which one byte each is kept


class Display(Protocol):
    """What a run shows while it trains; it cannot answer."""

    def step(self, step: int, row: Mapping[str, float]) -> None: ...
    def eval(self, step: int, results: Mapping[str, Mapping[str, float]], is_best: bool) -> None: ...
    def say(self, text: str) -> None: ...


class FindingLike(Protocol):
    """A finding, as far as the engine knows it."""

    rule: str
    severity: str
    title: str
    what: str

    def to_dict(self) -> dict[str, Any]: ...


class Watch(Protocol):
    """Follows a run and finds what is wrong with it; changes nothing."""

    def row(self, step: int, row: Mapping[str, float]) -> None: ...
    def table(self, kind: str, step: int, names: Sequence[str], columns: Mapping[str, Sequence[float]]) -> None: ...
    def eval(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None: ...
    def event(self, event: Mapping[str, Any]) -> None: ...
    def look(self) -> Sequence[FindingLike]: ...


class Recorder:
    """Training is the same without it. Without a record, on ranks other than the first, it does nothing."""

    DOCTOR_STEPS, DOCTOR_S = 20, 2.0  # between looks of the doctor, whichever is longer

    def __init__(
        self, setup: Setup, record: Record | None, show: Display, clock: Clock, watch: Watch | None = None
    ) -> None:
        self._setup, self._record, self._show, self._clock = setup, record, show, clock
        self._watch = watch if setup.cfg.signals.doctor and record is not None else None
        self._stats = ActivationStats(setup.state.model, setup.stepper.objectives[0], setup.precision)
        self._probes = setup.cfg.signals.probes
        self._coverage = Coverage(setup.streams["train"].num_rows)
        self._last_look = (setup.state.progress.step, time.monotonic())  # of the doctor
        self._saves = Checkpoints(record.path / "checkpoints") if record is not None else None
        self._keep = setup.cfg.checkpoint.keep
        self._has_reported_unread = False
        self._told_impure: set[str] = set()
        step = setup.state.progress.step  # a resumed run begins with what was read from its save
        self._saved = step if self._saves is not None and step in self._saves.steps() else None

    def activation_stats(self, step: int, micros: Sequence[Micro]) -> tuple[dict[str, Tensor], dict[str, Layered]]:
        """Sizes of activations and attention at this state, where they are due."""
        every = self._setup.cfg.signals.activation_stats_every
        if self._record is None or not every or step % every:
            return {}, {}
        had_reason = bool(self._stats.reason)
        found = self._stats.take(micros[0], step)
        if self._stats.reason and not had_reason:
            self.event("no_activation_stats", step=step, why=self._stats.reason)
        return found.scalars, {kind: Layered(*table) for kind, table in found.tables.items()}

    def host_row(self, step: int, lr: float, micros: Sequence[Micro], measures: bool) -> dict[str, float]:
        """What the host knows of the step that was just taken. Copying was done beside it, not in it."""
        spent = self._clock.lap()
        train_s = sum(spent.values()) - spent["eval"] - spent["save"] - spent["sample"]
        row = {"lr": lr, "step_s": train_s, "copy_s": sum(micro.copy_s for micro in micros)}
        row |= {f"{name}_s": seconds for name, seconds in spent.items()}
        setup, position = self._setup, self._setup.state.progress.position
        # Rows that grow with the step (a curriculum) take other arithmetic than the one that was counted.
        is_counted = all(row_shapes(micro.batch) == setup.flops.row_shapes for micro in micros)
        if setup.flops.peak is not None and train_s > 0 and is_counted:
            flops = setup.flops.per_row * setup.layout.rows_per_step
            row["mfu"] = flops / (train_s * setup.flops.peak * setup.world.size)
        if self._record is None:
            return row
        if setup.world.size == 1:
            ids = np.concatenate([micro.ids for micro in micros]) if len(micros) > 1 else micros[0].ids
        else:  # this rank has only its share of them
            ids = setup.streams["train"].ids(position, setup.layout.rows_per_step, setup.cfg.seed)
        row |= self._coverage.note(ids, position)
        if measures:
            row |= memory(setup.world.device)
            if len(micros) > 1:
                row["rows_first"] = float(len(micros[0].ids))
        return row

    def row(self, row: Row) -> None:
        """What a step left behind, and what was noticed about it."""
        if self._record is None:
            return
        self._record.log(row.step, row.values)
        self._show.step(row.step, row.values)
        for kind, (names, columns) in row.tables.items():
            self._record.table(kind, row.step, names, columns)
        if self._watch is not None:
            self._watch.row(row.step, row.values)
            for kind, (names, columns) in row.tables.items():
                self._watch.table(kind, row.step, names, columns)
        for spike in row.spikes:
            self.event("spike", step=row.step, **spike._asdict())
        if row.failure is not None and (tensors := row.failure.facts.get("tensors")):
            self.event("weights_broken", step=row.step, tensors=tensors, gradients_finite=True)

    def event(self, kind: str, step: int, **fields: Any) -> None:
        if self._record is not None:
            self._record.event(kind, step=step, **fields)
        if self._watch is not None:
            self._watch.event({"kind": kind, "step": step, **fields})

    def ask_the_doctor(self, step: int, is_end: bool = False) -> None:
        """Findings of a run while it trains, each once."""
        if self._watch is None or self._record is None:
            return
        last_step, last_s = self._last_look
        is_time = step - last_step >= self.DOCTOR_STEPS and time.monotonic() - last_s >= self.DOCTOR_S
        if not is_time and not is_end:
            return
        for finding in self._watch.look():
            self._record.event("finding", step=step, **finding.to_dict())
            if finding.severity != "info":
                self._show.say(f"{finding.severity}: {finding.title} ({finding.rule}): {finding.what}")
        self._last_look = (step, time.monotonic())

    def compare_ranks(self) -> None:
        """All ranks have the same weights, to the bit, or the run ends: they no longer train one model."""
        world, step = self._setup.world, self._setup.state.progress.step
        if world.size == 1:
            return
        named = list(self._setup.state.model.named_parameters())
        found = world.difference([p for _, p in named])
        if found is not None:
            names = [named[number][0] for number in found.numbers]
            self.event("ranks_differ", step=step, tensors=names, ranks=found.ranks)
            one = len(found.ranks) == 1
            raise UserError(
                f"at step {step} {'rank' if one else 'ranks'} {', '.join(map(str, found.ranks))} of {world.size} "
                f"{'has' if one else 'have'} other weights than the rest, first in {names[0]} ({len(names)} of "
                f"{len(named)} tensors differ): something in the recipe draws or computes differently on each rank, or "
                "a device computes wrongly; the last save is of the first rank's weights",
                code="ranks-differ",
            )

    def save(self, for_good: bool = False, is_best: bool = False) -> None:
        """Saves the state of this step, once; `for_good` keeps it whatever the rotation says.

        The first rank writes, and all ranks hear how that went.
        """
        self.compare_ranks()
        problem: UserError | None = None
        try:
            self._save(for_good, is_best)
        except UserError as error:
            problem = error
        self._setup.world.raise_together(problem)

    def _save(self, for_good: bool, is_best: bool) -> None:
        setup, step = self._setup, self._setup.state.progress.step
        if self._record is None or self._saves is None:
            return
        if step != self._saved:
            with self._clock.phase("save"):
                self._saves.save(setup.state, setup.save_extra())
                self._saves.clean(self._keep)
            self._saved = step
            self._record.event("save", step=step)
        if for_good:
            self._saves.pin(step)
        if is_best:
            self._saves.mark_best(step)

    def eval(self, results: Mapping[str, Mapping[str, float]], is_best: bool) -> None:
        if self._record is None:
            return
        step = self._setup.state.progress.step
        self._record.log(step, {f"eval/{s}/{name}": v for s, values in results.items() for name, v in values.items()})
        self._record.event("eval", step=step, results=results)
        self._show.eval(step, results, is_best)
        if self._watch is not None:
            self._watch.eval(step, results)
        if is_best:
            first = next(iter(results))
            self._record.update(best={"step": step, "set": first, "loss": results[first]["loss"]})

    def probe(self) -> None:
        """A failing probe is an event, not the end of the run, and is not tried again."""
        if not self._probes or (self._record is None and self._setup.world.size == 1):
            return
        step = self._setup.state.progress.step
        with self._clock.phase("eval"):
            try:
                found = probe(self._setup)
            except Exception as error:
                if self._setup.world.size > 1 and not isinstance(error, ProbeError):
                    raise  # the other ranks are in the middle of the trial step
                self._probes = False
                self.event("no_probes", step=step, why=error_text(error))
                return
        if found and self._record is not None:
            self._record.log(step, found)
            if self._watch is not None:
                self._watch.row(step, found)

    def rewound(self) -> None:
        """The run has gone back to a save."""
        self._saved = self._setup.state.progress.step

    def sample(self) -> None:
        """A failing sample is an event, not the end of the run."""
        if self._record is None:
            return
        setup, step = self._setup, self._setup.state.progress.step
        changes = Changes()
        with self._clock.phase("sample"):
            try:
                with pure(setup.state) as changes:
                    samples = setup.samples(Draw(setup.cfg.seed, step, np.arange(1)))
                for sample in samples:
                    self._record.add_sample(step, sample.name, sample.data, sample.caption)
            except Exception as error:
                self._record.event("sample_failed", step=step, error=str(error), traceback=traceback.format_exc())
                self._show.say(f"samples at step {step} failed: {error} (training continues; see events.ndjson)")
        self.impure("a sample", changes)

    def impure(self, what: str, changes: Changes) -> None:
        """What an eval or a sample has changed; each is an event, and the first of its kind a line."""
        if not changes:
            return
        step = self._setup.state.progress.step
        self.event("impure", step=step, during=what, changes=dict(changes), undone=changes.undone)
        told = changes.told
        if told and what not in self._told_impure:
            self._told_impure.add(what)
            undone = (
                "it was put back" if changes.undone else "it could not all be put back, and training goes on with it"
            )
            self._show.say(f"{what} at step {step} changed {named(told)}; {undone}: let it work on a copy")

    def report_unread_keys(self) -> None:
        """After the first eval: keys that were set and have no effect."""
        unread = self._setup.config.unread()
        if unread and not self._has_reported_unread and self._record is not None:
            self._record.event("unread_keys", keys=unread)
            why = {name: self._setup.config.schema.keys[name].doc for name in unread} | dict(self._setup.notes.unused)
            named = ", ".join(f"{name} ({why[name]})" for name in unread)
            self._show.say(f"these keys have no effect: {named}")
        self._has_reported_unread = True


class Coverage:
    """Whether the rows of a step follow each other, and whether they are new in this epoch; any order is allowed."""

    def __init__(self, epoch_rows: int) -> None:
        self._epoch_rows, self._epoch = epoch_rows, -1
        self._seen: np.ndarray | None = None

    def note(self, ids: np.ndarray, position: int) -> dict[str, float]:
        """`position` is that of the first row. An epoch that was entered in the middle counts from there."""
        digest = hashlib.blake2b(np.ascontiguousarray(ids, np.int64).tobytes(), digest_size=8).digest()
        row = {"batch_hash": float(int.from_bytes(digest, "little") >> 11)}  # a float holds 53 bits exactly
        if len(ids) > 1:
            row["follows"] = float(np.mean(np.diff(ids) == 1))
        if self._epoch_rows > MOST_ROWS or not len(ids) or ids.min() < 0 or ids.max() >= self._epoch_rows:
            return row
        num_fresh, end = 0, position + len(ids)
        while position < end:  # a step may reach into the next epoch
            epoch = position // self._epoch_rows
            if epoch != self._epoch or self._seen is None:
                self._epoch, self._seen = epoch, np.zeros(self._epoch_rows, bool)
            stop = min(end, (epoch + 1) * self._epoch_rows)
            distinct = np.unique(ids[len(ids) - (end - position) : len(ids) - (end - stop)])
            num_fresh += int((~self._seen[distinct]).sum())
            self._seen[distinct] = True
            position = stop
        return row | {"fresh": num_fresh / len(ids)}


def memory(device: torch.device) -> dict[str, float]:
    """Megabytes in use, of the process and of the GPU; and how busy and how warm that is."""
    found = {}
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        found["rss_mb"] = (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 2**20  # a mapped store is not ours
    except (OSError, ValueError, IndexError):  # not every system tells
        pass
    if device.type == "cuda":
        found["memory_mb"] = torch.cuda.memory_allocated(device) / 2**20
        found["reserved_mb"] = torch.cuda.memory_reserved(device) / 2**20
        found |= gpu_state(device)
    return found
