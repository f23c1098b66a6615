"""Replays a step of a run: a captured one to name its cause, any other to show that it comes out as it did.

Everything is computed in one process: the micros of all ranks come one after the other, and the first whose own loss or
gradient is bad names its rank. Nothing of the run is written to.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rung.doctor.history import read as read_history
from rung.engine import capture, checkpoint
from rung.engine.build import Setup, restore
from rung.engine.capture import Captured
from rung.engine.prefetch import Micro
from rung.engine.state import set_training
from rung.errors import CheckpointError, RunError, UserError
from rung.forensics.autopsy import autopsy
from rung.forensics.examine import NUM_OTHERS, Report, examine
from rung.forensics.first import error_line, is_usable
from rung.forensics.rerun import Rerun, Trial, with_size_one
from rung.forensics.verdict import Broken, Verdict
from rung.forensics.walk import Walk
from rung.runs.query import Run, ref

MOST_STEPS = 200  # that are taken again to find where weights broke
MORE = 20  # steps after a failure, in which another way of going there must hold
STEPS_APART = 20  # between lines about how far a replay has come


def captured_steps(run: Run) -> list[int]:
    """Oldest first."""
    return capture.steps(run.path / "captures")


def read(run: Run, step: int | None) -> Captured:
    """The capture of one of `captured_steps`, or the latest one."""
    known = captured_steps(run)
    if not known:
        raise RunError(
            f"{run.id} has no capture: none of its steps failed; "
            f"`rung replay {ref(run.path, run.id)}@STEP` replays any step",
            code="no-capture",
        )
    path = run.path / "captures" / f"{known[-1] if step is None else step:08d}"
    try:
        return capture.read(path)
    except UserError:
        raise
    except Exception as error:  # of the reader of tensors
        raise CheckpointError(
            f"the capture {path} is damaged: {' '.join(str(error).split())}", code="capture-damaged"
        ) from error


def replay(setup: Setup, run: Run, captured: Captured, report: Report, is_debug: bool = False) -> Verdict:
    """Why a captured step failed. `setup` is of the run's own config, as `build` leaves it, in one process."""
    fact = captured.facts[0]
    step, device = fact["step"], setup.world.device.type
    walk = Walk(setup, run, step)
    restore(setup, captured.path)
    set_training(setup.state.model)

    # What of the recorded step is not here.
    not_tested = []
    if fact["device"].partition(":")[0] != device:
        not_tested.append(f"the device of the run ({fact['device']}): this machine computes on {device}")
    if fact["torch"] != torch.__version__:
        not_tested.append(f"torch {fact['torch']}, with which it was recorded: here is {torch.__version__}")
    lost_ranks = sorted(set(range(fact["num_ranks"])) - {f["rank"] for f in captured.facts})
    not_tested += [f"rank {rank}: its batch was not captured" for rank in lost_ranks]

    # The micros of all ranks. What a loss wrote into was captured as it left it; the data has it as it was.
    of_ranks = [(f, m) for f, micros in zip(captured.facts, captured.micros, strict=True) for m in micros]
    micros = [micro for _, micro in of_ranks]
    written = ", ".join(sorted({name for f in captured.facts for name in f.get("written") or ()}))
    evidence = []
    try:
        for number, (of_rank, micro) in enumerate(of_ranks):
            if names := of_rank.get("written"):
                arrays = setup.streams["train"].gather(micro.ids, micro.draw)
                again = {name: torch.from_numpy(arrays[name].copy()) for name in names}
                micros[number] = micro._replace(batch={**micro.batch, **again})
        if written:
            evidence.append(f"the loss writes into {written} of its batch; it was gathered again")
    except Exception as error:  # of the stream, which may be anybody's
        micros = [micro for _, micro in of_ranks]
        why = error_line(error, 160)
        not_tested.append(f"{written} as it was: the loss writes into it, and it cannot be gathered again ({why})")
    if is_debug:
        stop_here(setup, micros)

    lost = Counter[str]()
    rerun = _rerun(
        setup,
        micros,
        step,
        fact["lr"],
        is_compiled=bool(fact["compile"]),
        ranks=[of_rank["rank"] for of_rank, _ in of_ranks],
        other_batches=lambda: _other_batches(setup, step, fact["position"], micros, lost),
        older_weights=lambda: _older_weights(walk, step),
        masks=walk.masks,
        history=lambda: read_history(run, with_parent=False),
        slower=lambda: _slower(walk, captured),
        rescaled=lambda rms: _rescaled(walk, captured, rms),
    )
    verdict = examine(rerun, fact.get("error") or "", not_tested, report, lambda: _first_broken(walk, captured))
    verdict.evidence += evidence
    verdict.not_tested += [f"{count} of the other batches, not gathered: {why}" for why, count in lost.items()]
    return verdict


def _rerun(setup: Setup, micros: list[Micro], step: int, lr: float, **options: Any) -> Rerun:
    state, rate = setup.state, setup.rate
    nominal, grad_clip = rate.rows_per_step * rate.targets_per_row, setup.cfg.optimizer.grad_clip
    return Rerun(state.model, state.objectives, micros, setup.precision, nominal, grad_clip, lr, step, **options)


def _other_batches(
    setup: Setup, step: int, position: int, micros: Sequence[Micro], lost: Counter[str]
) -> Iterator[list[Micro]]:
    """The rows of steps nearby in the places of this step's: those before it, then those after it.

    What could not be gathered is counted in `lost`, by why.
    """
    rows_per_step = setup.layout.rows_per_step
    stream, seed, num_before = setup.streams["train"], setup.cfg.seed, position // rows_per_step
    for away in [*range(-1, -1 - min(num_before, NUM_OTHERS), -1), *range(1, 1 + NUM_OTHERS)]:
        others = []
        try:
            ids = stream.ids(position + away * rows_per_step, rows_per_step, seed)
            for micro in micros:
                draw = micro.draw
                arrays = stream.gather(ids[draw.rows], type(draw)(seed, step + away, draw.rows))
                batch = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
                others.append(Micro(ids[draw.rows], draw, batch))
        except Exception as error:  # of the stream, which may be anybody's
            lost[error_line(error, 160)] += 1
            continue
        yield others


def _older_weights(walk: Walk, step: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The last whole save before the step; and the beginning, since a save may already be ill."""
    save = walk.last_whole_save(step - 1)
    if save is not None:
        yield f"the weights of step {save}", checkpoint.load(walk.saves.at(save)).weights
    weights = walk.initial() if step > 0 else None
    if weights is not None:
        yield "the weights of the beginning", weights


def _first_broken(walk: Walk, captured: Captured) -> Broken | None:
    """Takes the steps before a capture again until the weights are no longer finite."""
    end = captured.facts[0]["step"]

    def bad_weights() -> list[str]:
        named = walk.setup.state.model.named_parameters()
        return [name for name, p in named if name not in walk.masks and not is_usable(p)]

    try:
        begun = walk.go_to(end)
        start = walk.step
        if bad := bad_weights():
            return Broken(-1, begun, bad) if start == 0 else None
        if end - start > MOST_STEPS:
            return None
        while walk.step <= end:
            step, row = walk.step, walk.take()
            if not (bad := bad_weights()):
                continue
            searched = f"steps {start} to {step}"
            if row["skipped"] != 0:
                return Broken(step, searched, bad)
            # Gradients were finite, so the update broke them: up to it again, and looked at more closely.
            walk.go_to(step)
            while walk.step < step:
                walk.take()
            rerun = _rerun(walk.setup, walk.micros(), step, walk.lr())
            return Broken(step, searched, bad, True, autopsy(rerun, rerun.take(with_update=True)))
        return Broken(end, f"steps {start} to {end} from {begun}")
    except UserError:
        return None
    finally:
        restore(walk.setup, captured.path)


def _slower(walk: Walk, captured: Captured) -> Trial | None:
    """The steps before a capture at a tenth and less of the learning rate; the first rate at which they pass."""
    peak, found = walk.setup.cfg.lr.learning_rate, None
    rates = [rate for rate in (0.1 * peak, 0.01 * peak, 1e-2, 1e-3) if rate <= 0.1 * peak]
    for rate in rates:
        walk.rate = rate / peak
        found = _again(walk, captured, f"at a learning rate of {rate:.2g} in place of {peak:g}")
        if found is None or not found.fails:
            break
    walk.rate = 1.0
    return found._replace(lr=rate) if found is not None else None


def _rescaled(walk: Walk, captured: Captured, rms: Mapping[str, float]) -> Trial | None:
    """The steps before a capture with these arrays divided by these numbers."""
    walk.edit = lambda micro: with_size_one(micro, rms)
    try:
        return _again(walk, captured, f"with {', '.join(rms)} divided by {', '.join(f'{v:.3g}' for v in rms.values())}")
    finally:
        walk.edit = lambda micro: micro


def _again(walk: Walk, captured: Captured, how: str) -> Trial | None:
    """Takes the steps up to a capture again and some more, from the beginning or else the last save; None where they
    are too many.

    They fail if a loss is not finite, the last updates are not applied, or the loss ends above that of the beginning.
    """
    end, found = captured.facts[0]["step"], None
    starts = [0] if end <= MOST_STEPS else []
    save = walk.last_whole_save(end)
    starts += [save] if save and end - save <= MOST_STEPS else []
    try:
        for start in starts:
            begun = walk.go_to(start)
            first = walk.step
            rows = []
            while walk.step < min(end + 1 + MORE, walk.setup.num_steps):
                rows.append(walk.take())
                if not math.isfinite(rows[-1]["loss"]):
                    break
            losses = [row["loss"] for row in rows]
            level = abs(losses[0])
            is_open = first == 0 and len(losses) > 3 and float(np.median(np.abs(losses[-3:]))) > 1.5 * level + 1e-6
            fails = not all(map(math.isfinite, losses)) or all(row["skipped"] != 0 for row in rows[-4:]) or is_open
            found = Trial(f"steps {first} to {walk.step - 1} from {begun} {how}", fails)
            if not fails:
                break
    except UserError:
        return None
    finally:
        restore(walk.setup, captured.path)
        set_training(walk.setup.state.model)
    return found


@dataclass(frozen=True)
class Compared:
    """A step that was taken again, beside what the record says of it."""

    step: int
    begun: str
    num_steps: int
    loss: float
    norm: float
    recorded_loss: float
    recorded_norm: float
    note: str = ""

    @property
    def is_equal(self) -> bool:
        """To the bit; NaN equals NaN here."""
        pairs = ((self.loss, self.recorded_loss), (self.norm, self.recorded_norm))
        return all(a == b or (a != a and b != b) for a, b in pairs)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"is_equal": self.is_equal}

    def lines(self) -> list[str]:
        how = "equal to the bit" if self.is_equal else "not equal"
        lines = [f"step {self.step}  {how}  ({self.num_steps} steps from {self.begun})"]
        lines += [
            f"  {name:<6}{now!r}" + ("" if now == then or now != now else f", recorded {then!r}")
            for name, now, then in (("loss", self.loss, self.recorded_loss), ("norm", self.norm, self.recorded_norm))
        ]
        return lines + ([f"  {self.note}"] if self.note else [])


def replay_healthy(setup: Setup, run: Run, step: int, report: Report, is_debug: bool = False) -> Compared:
    """Takes a step of a run again, from the last whole save at or before it, and compares loss and norm."""
    columns = run.metrics(["loss", "norm"])
    rows = {
        s: (a, b) for s, a, b in zip(columns["step"], columns["loss"], columns["norm"], strict=True) if b is not None
    }
    if step not in rows:
        known = f"it has steps {min(rows)} to {max(rows)}" if rows else "it has none"
        known += f" and captures of {', '.join(map(str, captured_steps(run)))}" if captured_steps(run) else ""
        raise RunError(f"{run.id} has no row of step {step} to compare with; {known}", code="no-step")
    walk = Walk(setup, run)
    begun, first = walk.go_to(step), walk.step
    report(f"from {begun}")
    while walk.step < step:
        walk.take()
        if (walk.step - first) % STEPS_APART == 0:
            report(f"step {walk.step} of {step}")
    if is_debug:
        stop_here(setup, walk.micros())
    row = walk.take()
    loss, norm = rows[step]
    compared = Compared(step, begun, step - first + 1, row["loss"], row["norm"], float(loss), float(norm))
    if compared.is_equal:
        return compared
    derived = run.document.get("derived") or {}
    if derived.get("num_ranks", 1) > 1:
        note = f"it ran on {derived['num_ranks']} ranks; in one process sums are added in another order"
    elif setup.world.device.type != "cpu" or "cpu" not in str(derived.get("device", "cpu")):
        note = "kernels of a GPU round as they like; system.deterministic=true makes them repeat themselves"
    else:
        note = "on a CPU it should be: other code, another torch, or a loss that depends on something besides the step"
    return replace(compared, note=note)


def stop_here(setup: Setup, micros: Sequence[Micro]) -> None:
    """A debugger right before the forward of a step. Try `objective.loss(batch, draw)`, or step on with c."""
    if not micros:
        raise RunError(
            "this step was kept without a batch: weights were found broken before it; name an earlier step",
            code="no-batch",
        )
    model, objective = setup.state.model, setup.state.objectives[0]
    # A copy: what is tried here must not change what is taken afterwards.
    batch, draw = {name: tensor.clone() for name, tensor in micros[0].batch.items()}, micros[0].draw
    breakpoint()
    del model, objective, batch, draw
