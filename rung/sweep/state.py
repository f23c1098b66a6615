"""Who works on a point, and the status of each. All of it lies in the sweep's folder and in the runs themselves.

A claim is a numbered file, claims/<key>.<n>.json, made by a link, which only one process can win. It names the process
that works on the point and, once that is done, the outcome. The highest number counts; whoever finds it released, or
its process dead, may make the next. No lock is needed, so this also holds on network disks that have none. Claims are
never deleted: two processes could win a number that came free again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
import os
import signal
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.errors import CheckpointError, RunError
from rung.parse import mismatch
from rung.runs.files import read_json, refused, to_json, write_json
from rung.runs.marks import BEST, read_mark, saved_steps
from rung.runs.process import Liveness, liveness, this_process
from rung.runs.query import Run, list_runs, open_run
from rung.runs.record import utc_now
from rung.sweep.space import Sweep

OUTCOMES = ("finished", "stopped", "failed", "refused", "again")
_STOP = "stop"
# What readers of a claim rely on; one of another shape is what a power cut leaves, see _open.
_CLAIM = {
    "process": {"pid": int, "host": str, "boot_id": str, "namespace": str, "started": int}, "taken": str,
    "outcome": str, "text": str, "run": str, "ended": str, "again": str, "after": {"outcome": str, "text": str},
}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """One claim on a point, as it lies on disk."""

    path: Path
    number: int
    document: Mapping[str, Any]

    @property
    def outcome(self) -> str | None:
        """finished, stopped, failed, refused (a mistake to fix), again (somebody wants another try); None: held."""
        return self.document.get("outcome")

    @property
    def text(self) -> str:
        return str(self.document.get("text") or "")

    @property
    def after(self) -> Mapping[str, Any]:
        """outcome and text of the claim before this one."""
        return self.document.get("after") or {}

    def life(self, now_s: float | None = None) -> Liveness:
        """Whether the process that holds it is there: by its pid on this machine, by its sign of life elsewhere."""
        with contextlib.suppress(OSError):
            return liveness(self.document.get("process"), self.path.stat().st_mtime, now_s)
        return Liveness("vanished", "the claim is gone")

    @property
    def is_held(self) -> bool:
        return self.outcome is None and self.life().word == "running"

    @property
    def where(self) -> str:
        process = self.document.get("process") or {}
        return f"{process.get('host')}:{process.get('pid')}"

    def beat(self) -> bool:
        """Gives a sign of life; False when somebody else has taken over, as after a long sleep of this machine."""
        with contextlib.suppress(OSError):  # the training reports a full or absent disk
            os.utime(self.path)
        key = self.path.name.partition(".")[0]
        return not self.path.with_name(f"{key}.{self.number + 1}.json").exists()

    def release(self, outcome: str, text: str = "", run: str | None = None) -> None:
        """Releases the point and records the outcome."""
        assert outcome in OUTCOMES
        ended = {"outcome": outcome, "text": text, "run": run, "ended": utc_now()}
        try:
            write_json(self.path, {**self.document, **ended})
        except OSError as error:
            raise refused(str(self.path), error) from error


def last_claim(sweep: Sweep, key: str) -> Claim | None:
    """The claim that counts; None where nobody ever worked on the point."""
    folder = sweep.folder / "claims"
    return _open(folder, key, _last_numbers(folder).get(key))


def held_claims(sweep: Sweep) -> list[Claim]:
    """The claims of all processes that work on the sweep now."""
    folder = sweep.folder / "claims"
    claims = [_open(folder, key, number) for key, number in _last_numbers(folder).items()]
    return [claim for claim in claims if claim is not None and claim.is_held]


def take(sweep: Sweep, key: str) -> Claim | None:
    """Claims the point for this process; None where a live process holds it."""
    folder = sweep.folder / "claims"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            last = _open(folder, key, _last_numbers(folder).get(key))
            if last is not None and last.is_held:
                return None
            number = last.number + 1 if last else 1
            document = {
                "process": this_process(),
                "taken": utc_now(),
                "outcome": None,
                "after": {"outcome": last.outcome, "text": last.text} if last else None,
                "again": last.document.get("again") if last else None,
            }
            path, beside = folder / f"{key}.{number}.json", folder / f".{key}.{uuid.uuid4().hex}.part"
            try:
                beside.write_bytes(to_json(document) + b"\n")
                if last and last.outcome is None and last.life(beside.stat().st_mtime).word == "running":
                    return None  # by the clock of the disk, which is that of its signs of life
                os.link(beside, path)  # whole from the first moment, and there is one winner
                return Claim(path, number, document)
            except FileExistsError:
                continue
            finally:
                with contextlib.suppress(OSError):
                    beside.unlink()
    except OSError as error:
        raise refused(str(folder), error) from error


def try_again(sweep: Sweep, key: str) -> None:
    """Forgets that a point failed, so that it is worked on again."""
    claim = take(sweep, key)
    if claim is not None:
        dataclasses.replace(claim, document={**claim.document, "again": utc_now()}).release("again")


def _last_numbers(folder: Path) -> dict[str, int]:
    """Key -> the number of its last claim."""
    found: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            key, _, rest = name.partition(".")
            number, _, end = rest.partition(".")
            if key and number.isdecimal() and end == "json":
                found[key] = max(int(number), found.get(key, 0))
    return found


def _open(folder: Path, key: str, number: int | None) -> Claim | None:
    if number is None:
        return None
    path = folder / f"{key}.{number}.json"
    try:
        document = read_json(path)
    except OSError as error:
        message = f"cannot read {path}: {(error.strerror or str(error)).lower()}."
        raise RunError(message, code="cannot-read") from error
    except ValueError:  # what a power cut leaves: nobody knows whose it was, and it counts until it has gone silent
        document = None
    is_whole = isinstance(document, dict) and mismatch(document, _CLAIM, "it") is None
    return Claim(path, number, document if is_whole else {})


def ask_to_stop(sweep: Sweep) -> None:
    """Tells every process that works on a point, on any machine, to save and stop."""
    try:
        write_json(sweep.folder / _STOP, {"asked": utc_now(), "by": this_process()})
    except OSError as error:
        raise refused(str(sweep.folder / _STOP), error) from error


def signal_here(claim: Claim) -> bool:
    """Tells the process of a claim to save and stop, if it is one of this machine."""
    process, here = dict(claim.document.get("process") or {}), this_process()
    is_here = all(process.get(name) == here[name] for name in ("host", "boot_id", "namespace"))
    if not claim.is_held or not is_here:
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process["pid"], signal.SIGTERM)
        return True
    return False


def is_asked_to_stop(sweep: Sweep) -> bool:
    """Whether a launcher may start nothing more."""
    return (sweep.folder / _STOP).exists()


def allow_again(sweep: Sweep) -> None:
    """Withdraws the request to stop; whoever starts the sweep does it."""
    (sweep.folder / _STOP).unlink(missing_ok=True)


def runs_of(sweep: Sweep) -> dict[str, list[Run]]:
    """Key -> the runs of that point, oldest first; of all experiments, as a run may have been moved.

    One that was made elsewhere and serves the point comes before those that were made for it."""
    found: dict[str, list[Run]] = {}
    for run in list_runs(sweep.runs, None, []):
        of = run.document.get("sweep")
        if isinstance(of, dict) and of.get("name") == sweep.name and isinstance(of.get("point"), str):
            found.setdefault(of["point"], []).append(run)
    for runs in found.values():
        runs.sort(key=lambda run: str(run.document.get("created")))
    for point in sweep.points:
        if point.run is not None:
            with contextlib.suppress(RunError):  # of a run that was removed since
                found.setdefault(point.key, []).insert(0, open_run(sweep.runs / point.run, sweep.runs))
    return found


def best_of(runs: Sequence[Run]) -> Run | None:
    """The run that counts for a point: one that finished, else one that runs, else one to resume, else the newest."""
    newest = runs[::-1]
    finished = (run for run in newest if run.status == "finished")
    running = (run for run in newest if run.status == "running")
    to_resume = (run for run in newest if run.status != "diverged" and run.checkpoints())
    return next(itertools.chain(finished, running, to_resume, newest), None)


def run_of(sweep: Sweep, key: str) -> Run | None:
    """The run that counts for the point of this key."""
    return best_of(runs_of(sweep).get(key, []))


def is_hopeless(run: Run, claim: Claim | None) -> bool:
    """Whether the run diverged, as it would again, and nobody has asked for another try since."""
    again = str((claim.document.get("again") if claim else None) or "")
    return run.status == "diverged" and str(run.document.get("created")) > again


def is_evaluated(run: Run, split: str | None) -> bool:
    """Whether the save that `rung eval` takes was evaluated, and not only an earlier one, or a model of others."""
    if split is None:
        return True
    saved, best = run.path / "checkpoints", list[int]()
    with contextlib.suppress(CheckpointError):
        best = read_mark(saved, BEST)
    step = next(reversed(best or saved_steps(saved)), None)
    name = "*[0-9]" if step is None else str(step)  # without a save there is no telling which it was
    return any((run.path / "evals").glob(f"{glob.escape(split)}-{name}.json"))


@dataclass(frozen=True)
class State:
    """How a point stands. `word` is waiting, running, stopped, finished, failed or lost."""

    word: str
    where: str = ""
    text: str = ""
    run: Run | None = None
    is_final: bool = False  # failed for good: left alone until somebody asks for another try


def state_of(sweep: Sweep, claim: Claim | None, run: Run | None) -> State:
    """How a point stands, by its last claim and the run that counts for it."""
    if claim is not None and claim.is_held:
        return State("running", claim.where, claim.life().text, run)
    if run is not None and run.status == "running":
        return State("running", "", run.status_text, run)
    if run is not None and run.status == "finished":
        if is_evaluated(run, sweep.eval_split):
            return State("finished", run=run)
        if claim is None or claim.outcome not in ("failed", "refused"):
            return State("stopped", text=f"{run.id} is trained, and not yet evaluated on {sweep.eval_split}", run=run)
    if claim is not None and claim.outcome in ("failed", "refused"):
        return State("failed", text=claim.text, run=run, is_final=claim.outcome == "failed")
    if claim is not None and claim.outcome is None:
        return State("lost", claim.where, claim.life().text, run)
    if run is None:
        return State("waiting")
    if is_hopeless(run, claim):
        return State("failed", text=f"{run.id} diverged", run=run, is_final=True)
    if run.status == "diverged":
        return State("waiting", text=f"{run.id} diverged; it is tried again", run=run)
    saved = run.checkpoints()
    return State("stopped", text=f"continues with {run.id}" if saved else f"{run.id} saved nothing", run=run)


def states(sweep: Sweep) -> dict[str, State]:
    """Key -> how the point stands, in the order of the plan."""
    folder = sweep.folder / "claims"
    numbers, runs = _last_numbers(folder), runs_of(sweep)
    claims = {one.key: _open(folder, one.key, numbers.get(one.key)) for one in sweep.points}
    return {key: state_of(sweep, claim, best_of(runs.get(key, []))) for key, claim in claims.items()}
