"""What happens around `fit`: checks before it, mirrors and uploads beside it, first and last lines, the record's end.

`rung.train` and `rung.resume` build a setup and open a record; from there on they are the same, and it is here. How a
run ends is a status of the run that is returned; only what nobody intended is raised.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rung.config import differences
from rung.errors import RecipeError, UserError
from rung.lab import runs_folder
from rung.progress import Display, MakeDisplay, Silent, reporter
from rung.recipe import Plays, Recipe
from rung.runs.failure import failure_of
from rung.runs.query import Run, ref
from rung.runs.record import read_document
from rung.text import error_text, write
from rung.units import count, duration

if TYPE_CHECKING:
    from rung.doctor.preflight.result import Result
    from rung.engine.build import Setup
    from rung.engine.loop import Outcome, StopRequest
    from rung.remote.upload import Uploader
    from rung.resolve import Resolved
    from rung.runs.record import Record
    from rung.trackers.mirror import Mirror


class Followers:
    """Where else a run is written while it trains: other trackers, object storage."""

    def __init__(self, mirrors: Sequence[str] = (), remote: str | None = None) -> None:
        self._kinds, self._remote = list(dict.fromkeys(mirrors)), remote
        self._mirrors: list[Mirror] = []
        self._upload: Uploader | None = None
        self._require()
        if remote is not None:
            from rung.remote import upload

            upload.require(remote)

    def _require(self) -> None:
        """Raises UserError where a tracker cannot be used; called before a run begins, so that no run is lost to it."""
        if self._kinds:
            from rung.trackers.mirror import require

            for kind in self._kinds:
                require(kind)

    def configure(self, resolved: Resolved) -> None:
        """Adds what the config asks for."""
        if resolved.config.view("engine").logging.wandb_log and "wandb" not in self._kinds:
            self._kinds.append("wandb")
            self._require()
        if "wandb" in self._kinds:
            resolved.config.reads.add("logging.wandb_project")  # by the mirror, out of the record

    def follow(self, record: Record) -> None:
        """From now on they receive each row and event."""
        if self._kinds:
            from rung.trackers.mirror import open_mirror

            run = Run(record.path, read_document(record.path))
            self._mirrors = [open_mirror(kind, record.path, run.document, run.config()) for kind in self._kinds]
            for mirror in self._mirrors:
                record.follow(mirror)
        if self._remote is not None:
            from rung.remote.upload import Uploader

            self._upload = Uploader(record.path, self._remote)
            self._upload.ask()
            record.follow(self._upload)

    def lines(self) -> list[str]:
        return [one.summary_line() for one in (*self._mirrors, self._upload) if one is not None]

    def wait(self) -> None:
        """Waits for the last push, with progress; after Ctrl-C, `lines` says how to complete it."""
        if self._upload is None:
            return
        report, close = reporter()
        try:
            self._upload.close(report=report)
        except KeyboardInterrupt:
            self._upload.close(timeout=0)
        finally:
            close()


def check_before(setup: Setup, recipe: str) -> list[Result]:
    """The quick form of `rung check`; raises UserError where a check fails."""
    from rung.doctor.preflight.checks import quick

    results: list[Result] = []
    problem: UserError | None = None
    try:
        if setup.world.is_first:  # checks exchange nothing between ranks, and all have the same weights and data
            results = quick(setup)
    except UserError as error:
        problem = error
    failed = [result for result in results if result.level == "fail"]
    if failed:
        lines = "\n".join(f"  {one.name}: {one.seen}; {one.remedy}" for one in failed)
        problem = UserError(
            f"{len(failed)} of {len(results)} checks before step 0 failed; nothing was started:\n{lines}\n"
            f"`rung check {recipe}` shows them all; --no-check trains anyway",
            code="check-failed",
        )
    setup.world.raise_together(problem)
    return results


def header(run_id: str, resolved: Resolved, setup: Setup, why: str | None, checked: Sequence[Result]) -> list[str]:
    """Everything that was chosen for the user, with the reason, and what the checks have to say."""
    preset = f"  {resolved.preset}" if resolved.preset else ""
    lines = [f"{run_id}{preset}  {count(setup.derived['parameters'])} parameters"]
    if resolved.parent is not None:
        changed = differences(resolved.parent.config(), resolved.config.tree())
        what = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items()) or "nothing in the config"
        lines.append(f"from {resolved.parent.id}: {what}")
        values = resolved.config.values
        family = [f"lr.{name}" for name in ("warmup_start_lr", "min_lr") if values[f"lr.{name}"]]
        left = [name for name in family if name not in changed]
        old, new = changed.get("lr.learning_rate") or (None, None)
        if old and new and left:
            lines.append(
                f"note: lr.learning_rate is {new / old:g} times what it was, and {' and '.join(left)} did not follow; "
                f"to scale all of them, set lr.scale={values['lr.scale'] * new / old:g} instead"
            )
    lines += [f"{alias} is read as {name}" for name, alias in resolved.config.aliased.items()]
    if why:
        lines.append(f'why: "{" ".join(why.split())}"')
    lines += setup.chosen
    if checked:
        warned = [result for result in checked if result.level == "warn"]
        num_passed = sum(result.level == "pass" for result in checked)
        lines.append(f"{num_passed} checks passed" + (f", {len(warned)} with a warning" if warned else ""))
        lines += [f"warning: {one.name}: {one.seen}; {one.remedy}" for one in warned]
    return lines


def train_to_end(
    setup: Setup,
    record: Record | None,
    opening: Sequence[str],
    followers: Followers,
    make_display: MakeDisplay,
    asked: StopRequest,
) -> Run:
    """Trains with a display and ends the record with what became of it. Only the first rank has a record.

    asked: entered before the record was made and left when it is complete, so that no signal between the two leaves a
    run behind that nobody ended.
    """
    from torch import OutOfMemoryError

    from rung.doctor.live import live_doctor
    from rung.engine.loop import Outcome, fit
    from rung.engine.parallel import RankError

    world = setup.world
    outcome = Outcome("crashed", "an error of rung or of the recipe")
    show: Display = Silent()
    try:
        # The folder and the id of the run, as the first rank has them.
        run_path, run_id = world.from_first(None if record is None else (str(record.path), record.id))
        if world.watchdog is not None:
            world.watchdog.start(Path(run_path) / "stalls", partial(end_stalled, setup, record))
        if record is not None:
            baselines = {name: stream.baselines for name, stream in setup.streams.items()}
            show = make_display(setup.num_steps, setup.cfg.logging.log_interval, baselines)
            show.say("\n  ".join([*opening, *followers.lines()]))
        outcome = fit(setup, record, show, None if record is None else live_doctor(record.path), asked)
    except UserError as error:  # a full disk, say: the run can continue once it is fixed
        outcome = Outcome("stopped", str(error))
        world.explain(error)
        raise
    except BaseException as error:
        outcome = Outcome("crashed", error_text(error))
        if (failed := world.explain(error)) is not None:
            outcome = (
                Outcome("crashed", str(failed)) if failed.code == RankError.code else Outcome("stopped", str(failed))
            )
            raise failed from None
        if isinstance(error, SystemExit):  # with 0 it would look like a success to whoever waits for the process
            outcome = Outcome("crashed", f"the recipe called sys.exit({error.code or 0})")
            raise RecipeError(
                f"the recipe called sys.exit({error.code or 0}) at step {setup.state.progress.step}; raise an error "
                "where training cannot go on, or set a budget such as optimizer.max_iters.",
                code="recipe-exit",
            ) from error
        root: BaseException | None = error  # torch's file writer raises something of its own on top of Ctrl-C
        while root is not None and not isinstance(root, KeyboardInterrupt):
            root = root.__cause__ or root.__context__
        if root is not None:
            outcome = Outcome("stopped", "interrupted twice", signal.SIGINT)
        elif isinstance(error, OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            raise UserError(
                f"out of memory at step {setup.state.progress.step}: {error_text(error)[:240]}; lower "
                f"data.batch_size={setup.cfg.data.batch_size} (and raise optimizer.gradient_accumulation_steps), or "
                "take a smaller model or context",
                code="out-of-memory",
            ) from error
        else:
            raise
    finally:
        show.close()
        is_failing = sys.exc_info()[0] is not None
        world.leave(is_orderly=not is_failing)
        if record is not None:
            totals = asdict(setup.state.progress)
            try:
                if outcome.status == "crashed" and (raised := sys.exc_info()[1]) is not None:
                    failure = failure_of((isinstance(raised, UserError) and raised.__cause__) or raised)
                    record.event("crash", step=totals["step"], **failure)
                    record.update(failure=failure)
                record.finish(outcome.status, reason=outcome.reason, last_step=totals["step"], totals=totals)
            except UserError:  # the disk is full, say: that must not hide why the run ended
                if not is_failing:
                    raise
            asked.restore()  # Ctrl-C now ends the waiting
            followers.wait()
    if record is None:
        return Run(Path(run_path), {"id": run_id, "status": outcome.status, "reason": outcome.reason})
    show.say("\n".join([*closing(setup, record, outcome), *followers.lines()]))
    run = Run(record.path, read_document(record.path))
    run.stop_signal = outcome.signal
    return run


def end_stalled(setup: Setup, record: Record | None, why: str, code: int) -> None:
    """Ends the record of a run whose ranks wait for one that does not come, or that failed (with `code` 2 by a user's
    mistake); called from the watchdog's thread."""
    if record is None:
        return
    step, is_mistake = setup.state.progress.step, code == 2
    if not is_mistake:
        record.event("stall", step=step, why=why)
    status = "stopped" if is_mistake else "crashed"
    record.finish(status, reason=why, last_step=step, totals=asdict(setup.state.progress))
    write(sys.stderr, f"rung: {why}{'' if is_mistake else ' [stalled]'}\n")


def next_commands(setup: Setup, record: Record, name: str) -> list[str]:
    """What one may want to see next; each works for this recipe, with what is installed."""
    recipe, has_web = type(setup.recipe), find_spec("starlette") is not None and find_spec("uvicorn") is not None
    commands = []
    if any((record.path / "checkpoints").glob("[0-9]*")):
        if has_web and issubclass(recipe, Plays):
            commands.append(f"rung play {name}")
        if recipe.sample is not Recipe.sample:
            commands.append(f"rung sample {name}")
    commands.append(f"rung report {name}")
    root = record.path.parents[1]
    place = "" if root.resolve() == runs_folder().resolve() else f" --runs {shlex.quote(str(root))}"
    return [*commands, f"rung serve{place}"] if has_web else commands


def closing(setup: Setup, record: Record, outcome: Outcome) -> list[str]:
    """The run's id, its best eval loss, and the paths to look at."""
    from rung.engine.checkpoint import Checkpoints

    progress = setup.state.progress
    lines = [
        f"{record.id} {outcome.status}{': ' + outcome.reason if outcome.reason else ''}  "
        f"{progress.step} steps, {count(progress.targets)} targets, {duration(progress.elapsed_s)}"
    ]
    if progress.best_loss is not None:
        name = next(iter(setup.evaluator.streams))
        base = "".join(f", {what} {value:.4f}" for what, value in setup.streams[name].baselines.items())
        lines.append(f"best {name} loss {progress.best_loss:.4f} at step {progress.best_step}{base}")
    # The folder as a person in the current one would type it.
    path = record.path.relative_to(Path.cwd()) if record.path.is_relative_to(Path.cwd()) else record.path
    name = ref(record.path, record.id)
    samples = sorted((path / "samples").glob("*/*"))
    if samples:
        lines += [f"look at {sample}" for sample in samples if sample.parent == samples[-1].parent]
    lines.append(f"look at {path}, or `rung show {name}`")
    if outcome.status in ("finished", "stopped"):
        lines.append("next: " + ", ".join(f"`{command}`" for command in next_commands(setup, record, name)))
    saves = Checkpoints(record.path / "checkpoints").steps()
    if outcome.status == "stopped":
        remedy = f"continue with `rung resume {name}` (saved at step {saves[-1]})"
        lines.append(remedy if saves else "nothing was saved")
    if outcome.status == "diverged":
        kept = f"the last save is of step {saves[-1]}" if saves else "nothing was saved before it"
        events = list(Run(record.path, read_document(record.path)).events("diverged"))
        if not events:
            return [*lines, kept]
        last = events[-1]
        state = f"Weights and optimizer are those before step {last['step']}"
        if last.get("is_broken"):
            state = "The weights are as they were found"
        place = f", kept with the batch in {path / last['capture']}" if last.get("capture") else ""
        lines += [
            f"first look: {last.get('diagnosis')}. {state}{place}; {kept}",
            f"find out why with `rung replay {name}`; what led to it with `rung doctor {name}`",
        ]
    return lines
