"""What is done between steps: log, save, evaluate, probe, sample; and what is noticed while logging."""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rung.data.prefetch import Micro
from rung.engine.build import Setup, row_shapes
from rung.engine.checkpoint import Checkpoints
from rung.engine.clock import Clock
from rung.engine.guard import not_finite
from rung.engine.look import Look
from rung.engine.probes import probe
from rung.engine.rescue import Diverged
from rung.engine.rows import Coverage
from rung.engine.signals import Layered, Row
from rung.recipe import Draw
from rung.robust import Spikes
from rung.runs.record import Record

SPIKE = 8.0  # spreads above what was expected: see robust.surprise; a batch of one repeated token has 72 to 154
COMPARE_STEPS = 500  # between looks at whether all ranks still have the same weights


class Display(Protocol):
    """What a run shows while it goes on. It is told, and cannot answer."""

    def step(self, step: int, row: Mapping[str, float]) -> None: ...
    def eval(self, step: int, results: Mapping[str, Mapping[str, float]], is_best: bool) -> None: ...
    def say(self, text: str) -> None: ...


class Told(Protocol):
    """A finding, as far as the engine knows it."""

    rule: str
    severity: str
    title: str
    what: str

    def plain(self) -> dict[str, Any]: ...


class Watch(Protocol):
    """Who follows a run and has something to say of its health. It is told everything, and changes nothing."""

    def row(self, step: int, row: Mapping[str, float]) -> None: ...
    def table(self, kind: str, step: int, names: Sequence[str], columns: Mapping[str, Sequence[float]]) -> None: ...
    def eval(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None: ...
    def event(self, event: Mapping[str, Any]) -> None: ...
    def look(self) -> Sequence[Told]: ...


class Keeper:
    """Changes nothing that is learned. Without a record, on ranks other than the first, it only takes part in evals."""

    WATCH_STEPS, WATCH_S = 20, 2.0  # between looks of the watch, whichever is longer

    def __init__(
        self, setup: Setup, record: Record | None, show: Display, clock: Clock, watch: Watch | None = None
    ) -> None:
        self._setup, self._record, self._show, self._clock = setup, record, show, clock
        self._watch = watch if setup.cfg.signals.doctor else None
        self._layers_every, self._look_every = setup.cfg.signals.layers_every, setup.cfg.signals.look_every
        self._probes = setup.cfg.signals.probes
        self._coverage = Coverage(setup.streams["train"].num_rows)
        self._look = Look(setup.state.model, setup.stepper.objectives[0], setup.precision)
        self._spikes = {"loss": Spikes(), "norm": Spikes()}
        self._odd = set(self._broken())  # not finite from the start, as a mask that is kept as a parameter
        self._first_step, self._watched = setup.state.progress.step, (setup.state.progress.step, time.monotonic())
        self._saves = Checkpoints(record.path / "checkpoints") if record is not None else None
        self._reported_unread = False
        saving = setup.cfg.checkpoint
        self._keep, self._saves_best, self._geometric = saving.keep, saving.best, saving.geometric
        self._saves_initial, self._patience = saving.initial, setup.cfg.eval_patience
        step = setup.state.progress.step  # a resumed run begins with what was read from its save
        self._saved = step if self._saves is not None and step in self._saves.steps() else None

    def begin(self) -> None:
        """The save before the first step, where it is wanted."""
        if self._saves_initial and self._setup.state.progress.step == 0:
            self._save_for_good()

    def measures(self, step: int) -> bool:
        """Whether norms per tensor are wanted of this step: every so often, and in the first steps of an attempt."""
        return self._layers_every > 0 and (
            step % self._layers_every == 0 or step - self._first_step < min(20, self._layers_every)
        )

    def look(self, step: int, micros: Sequence[Micro]) -> tuple[dict[str, Tensor], dict[str, Layered]]:
        """Activations and attention at this state, where it is time for a look."""
        if self._record is None or not self._look_every or step % self._look_every:
            return {}, {}
        had_reason = bool(self._look.reason)
        looked = self._look.take(micros[0], step)
        if self._look.reason and not had_reason:
            self._tell("no_looks", step=step, why=self._look.reason)
        return looked.scalars, {kind: Layered(*table) for kind, table in looked.tables.items()}

    def layers(self) -> tuple[dict[str, Tensor], dict[str, Layered]]:
        """What the stepper measured around the update."""
        layers = self._setup.stepper.layers
        first = {} if layers.norm_first is None else {"norm_first": layers.norm_first}
        return first, {"tensors": Layered(layers.names, {**layers.measured, **layers.fixed})}

    def host_row(self, step: int, lr: float, micros: Sequence[Micro]) -> dict[str, float]:
        """What the host knows of the step that was just taken. Copying was done beside it, not in it."""
        spent = self._clock.lap()
        train_s = sum(spent.values()) - spent["eval"] - spent["save"] - spent["sample"]
        row = {"lr": lr, "step_s": train_s, "copy_s": sum(micro.copy_s for micro in micros)}
        row |= {f"{name}_s": seconds for name, seconds in spent.items()}
        setup = self._setup
        # Rows that grow with the step (a curriculum) take other arithmetic than the one that was counted.
        is_counted = all(row_shapes(micro.batch) == setup.counted_shapes for micro in micros)
        if setup.peak_flops is not None and train_s > 0 and is_counted:
            flops = setup.flops_per_row * setup.cut.rows_per_step
            row["mfu"] = flops / (train_s * setup.peak_flops * setup.world.size)
        if self._record is not None:
            row |= self._coverage.note(self._ids(micros), setup.state.progress.position)
            if self.measures(step):
                row |= memory(setup.world.device)
                if len(micros) > 1:
                    row["rows_first"] = float(len(micros[0].ids))
        return row

    def _ids(self, micros: Sequence[Micro]) -> np.ndarray:
        """The rows of the whole step, of which this rank may have only its share."""
        setup = self._setup
        if setup.world.size == 1:
            return micros[0].ids if len(micros) == 1 else np.concatenate([micro.ids for micro in micros])
        position, stream = setup.state.progress.position, setup.streams["train"]
        return stream.ids(position, setup.cut.rows_per_step, setup.cfg.seed)

    def log(self, rows: Iterable[Row]) -> None:
        """Writes rows as they arrive; raises Diverged at the first whose step could not be applied."""
        progress = self._setup.state.progress
        for step, row, tables in rows:
            has_diverged = row.pop("diverged") > 0
            bad_micro = max((int(row.pop(name)) for name in list(row) if name.endswith("bad_micro")), default=None)
            if not has_diverged:
                progress.targets += int(row["targets"])
                progress.skipped += int(row["skipped"])
            if self._record is not None:
                self._record.log(step, row)
                self._show.step(step, row)
                for kind, (names, columns) in tables.items():
                    self._record.table(kind, step, names, columns)
                if self._watch is not None:
                    self._watch.row(step, row)
                    for kind, (names, columns) in tables.items():
                        self._watch.table(kind, step, names, columns)
            if has_diverged:
                raise self._diverged(step, row, bad_micro)
            self._notice_spikes(step, row)
        self._ask_the_watch(progress.step)

    def _diverged(self, step: int, row: Mapping[str, float], bad_micro: int | None) -> Diverged:
        broken, self._setup.stepper.broken = self._setup.stepper.broken, []
        if broken:
            shown = ", ".join(broken[:3]) + (f" and {len(broken) - 3} more" if len(broken) > 3 else "")
            self._tell("weights_broken", step=step, tensors=broken, gradients_finite=True)
            why = f"gradients were finite, but the update would have broken {shown} at step {step}; it was undone"
            return Diverged(step, why, tensors=broken)
        # (a look may say NaN of something that is not there)
        values = {k: v for k, v in row.items() if not math.isfinite(v) and not k.startswith("look/")}
        bad = ", ".join(f"{name} {value:g}" for name, value in values.items())
        why = f"{bad or 'float16 overflowed at every scale'} at step {step}; the update was not applied"
        # Without a number there was one micro only. Where no loss is bad, the gradients of all together are.
        return Diverged(step, why, values=values, micro=0 if bad_micro is None else bad_micro)

    def _notice_spikes(self, step: int, row: Mapping[str, float]) -> None:
        """After a spike updates are looked at for a while; ranks see the same rows at the same time, and agree."""
        for name, spikes in self._spikes.items():
            score = spikes.score(row[name])
            if score > SPIKE and math.isfinite(score):
                self._setup.stepper.guard.arm(self._setup.state.progress.step)
                self._tell("spike", step=step, signal=name, score=score, value=row[name])

    def _tell(self, kind: str, step: int, **fields: Any) -> None:
        if self._record is not None:
            self._record.event(kind, step=step, **fields)
        if self._watch is not None:
            self._watch.event({"kind": kind, "step": step, **fields})

    def _ask_the_watch(self, step: int, is_end: bool = False) -> None:
        """Findings of a run that is going on, each once."""
        if self._watch is None or self._record is None:
            return
        last_step, last_s = self._watched
        is_time = step - last_step >= self.WATCH_STEPS and time.monotonic() - last_s >= self.WATCH_S
        if not is_time and not is_end:
            return
        for finding in self._watch.look():
            self._record.event("finding", step=step, **finding.plain())
            if finding.severity != "info":
                self._show.say(f"{finding.severity}: {finding.title} ({finding.rule}): {finding.what}")
        self._watched = (step, time.monotonic())

    def compare_ranks(self, step: int) -> None:
        """All ranks have the same weights, to the bit, or something is very wrong."""
        if self._setup.world.size == 1 or step % COMPARE_STEPS:
            return
        named = list(self._setup.state.model.named_parameters())
        differing = self._setup.world.differing([p for _, p in named])
        if differing:
            names = [named[number][0] for number in differing]
            self._tell("ranks_differ", step=step, tensors=names)
            self._show.say(f"sick: at step {step} ranks have different weights: {', '.join(names[:5])}")

    def save(self) -> None:
        state = self._setup.state
        if state.progress.step == self._saved:
            return
        self._refuse_broken(state.progress.step)  # on every rank, or one would stop alone
        if self._record is None or self._saves is None:
            return
        with self._clock.phase("save"):
            self._saves.save(state, self._setup.save_extra())
            self._saves.clean(self._keep)
        self._saved = state.progress.step
        self._record.event("save", step=state.progress.step)

    def _save_for_good(self) -> None:
        self.save()
        if self._saves is not None:
            self._saves.pin(self._setup.state.progress.step)

    def _refuse_broken(self, step: int) -> None:
        """Weights that are not finite are never saved over good ones."""
        names = [name for name in self._broken() if name not in self._odd]
        if names:
            self._tell("weights_broken", step=step, tensors=names, gradients_finite=None)
            why = f"weights are not finite at step {step} ({', '.join(names[:3])}); they were not saved"
            raise Diverged(step, why, is_broken=True, tensors=names)

    def _broken(self) -> list[str]:
        parameters = [p for o in self._setup.stepper.objectives for p in o.parameters]
        bad = not_finite([p.detach() for p in parameters])
        return self._setup.stepper.layers.names_of([parameters[number] for number in bad])

    def evaluate(self) -> None:
        state, progress = self._setup.state, self._setup.state.progress
        if progress.eval_steps and progress.eval_steps[-1] == progress.step:
            return
        with self._clock.phase("eval"):
            results = self._setup.evaluator.run(state.model)
        if not results:
            return
        first = next(iter(results))
        loss = results[first]["loss"]
        progress.evals.append(loss)
        progress.eval_steps.append(progress.step)
        is_best = math.isfinite(loss) and (progress.best_loss is None or loss < progress.best_loss)
        if is_best:
            progress.best_loss, progress.best_step = loss, progress.step
        if self._record is None or self._saves is None:
            return
        self._record.log(
            progress.step, {f"eval/{s}/{name}": v for s, values in results.items() for name, v in values.items()}
        )
        self._record.event("eval", step=progress.step, results=results)
        self._show.eval(progress.step, results, is_best)
        if self._watch is not None:
            self._watch.eval(progress.step, results)
        if is_best:
            if self._saves_best:
                self.save()
                self._saves.mark_best(progress.step)
            self._record.update(best={"step": progress.step, "set": first, "loss": loss})
        if marks_progress(progress.evals, self._geometric):
            self._save_for_good()
        self._report_unread()
        self._probe()

    def is_out_of_patience(self) -> bool:
        """Whether the last evals brought no new lowest loss; the same on every rank, and after a resume."""
        evals = self._setup.state.progress.evals
        return self._patience > 0 and since_best(evals) >= self._patience

    def _probe(self) -> None:
        """A failing probe is an event, not the end of the run, and is not tried again."""
        if not self._probes or self._record is None:
            return
        step = self._setup.state.progress.step
        with self._clock.phase("eval"):
            try:
                found = probe(self._setup)
            except Exception as error:
                self._probes = False
                self._tell("no_probes", step=step, why=f"{type(error).__name__}: {error}")
                return
        if found:
            self._record.log(step, found)
            if self._watch is not None:
                self._watch.row(step, found)

    def finish(self) -> None:
        """The last look of the watch."""
        self._ask_the_watch(self._setup.state.progress.step, is_end=True)

    def rewound(self) -> None:
        """The run has gone back to a save: what was known of later steps is no longer true."""
        self._saved = self._setup.state.progress.step
        self._spikes = {name: Spikes() for name in self._spikes}

    def sample(self) -> None:
        """A failing sample is an event, not the end of the run."""
        if self._record is None:
            return
        setup, step = self._setup, self._setup.state.progress.step
        with self._clock.phase("sample"):
            try:
                for sample in setup.samples(Draw(setup.cfg.seed, step, np.arange(1))):
                    self._record.add_sample(step, sample.name, sample.data, sample.caption)
            except Exception as error:
                self._record.event("sample_failed", step=step, error=str(error), traceback=traceback.format_exc())
                self._show.say(f"samples at step {step} failed: {error} (training goes on; see events.ndjson)")

    def _report_unread(self) -> None:
        unread = self._setup.config.unread()
        if unread and not self._reported_unread and self._record is not None:
            self._record.event("unread_keys", keys=unread)
            why = self._setup.recipe.unused()
            told = ", ".join(f"{name} ({why[name]})" if name in why else name for name in unread)
            self._show.say(f"set, but read by nothing so far: {told}")
        self._reported_unread = True


def since_best(evals: Sequence[float]) -> int:
    """How many evals came after the one with the lowest loss."""
    best, place = math.inf, 0
    for number, loss in enumerate(evals, start=1):
        if loss < best:
            best, place = loss, number
    return len(evals) - place


def marks_progress(evals: Sequence[float], share: float) -> bool:
    """Whether the last eval is below `share` of the loss at the last one that was; the first one sets the mark."""
    mark, is_below = math.inf, False
    for loss in evals:
        is_below = share > 0 and math.isfinite(mark) and loss < share * mark
        if is_below or (math.isinf(mark) and math.isfinite(loss)):
            mark = loss
    return is_below


def memory(device: torch.device) -> dict[str, float]:
    """Megabytes in use: of the process, and of the GPU."""
    found = {}
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        found["rss_mb"] = (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 2**20  # a mapped store is not ours
    except (OSError, ValueError, IndexError):  # not every system tells
        pass
    if device.type == "cuda":
        found["memory_mb"] = torch.cuda.memory_allocated(device) / 2**20
        found["reserved_mb"] = torch.cuda.memory_reserved(device) / 2**20
    return found
