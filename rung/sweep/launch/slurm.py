"""Sweeps on SLURM: each point's command is one task of a job array, submitted through submitit.

When SLURM stops a job, because its time is up or it is preempted, the training saves, the job is requeued, and the next
attempt continues from the checkpoint. The driver only follows: Ctrl-C leaves the jobs alone, and the same command
attaches to those still in the queue. Job states come from squeue and submitit's files, never from sacct: many clusters,
and every small one, keep no accounts.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rung.errors import RunError, UserError
from rung.runs.files import read_json, write_json
from rung.sweep.launch import ReportState, Resources, dict_option, int_option, list_option, text_option
from rung.sweep.launch.child import Child
from rung.sweep.plan import load
from rung.sweep.point import FINISHED, STOPPED
from rung.sweep.space import Point, Sweep
from rung.sweep.state import is_asked_to_stop, last_claim
from rung.text import one_line

POLL_S = 5.0
LATE_S = 15.0  # a network disk may show the result of a job a while after the job is gone
MOST_STARTS = 20  # of one point: something that is lost twenty times is not lost by chance
MOST_REQUEUES = 1000  # for want of time; each attempt continues where the last one saved
ARRAY_SIZE = 1000  # tasks of one job array; SLURM's own default allows so many
TIME_MIN = 240
SIGNAL_DELAY_S = 90
_WAITS = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING")
_RUNS = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_IS_LOST = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "TIMEOUT", "DEADLINE", "REVOKED", "GONE")


class _Plain(pickle.Unpickler):
    """Reads tuples, texts and numbers, and nothing that would be executed: the folder of a sweep may be a copy."""

    def find_class(self, module_name: str, name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{name} is no result of a point")


class PointTask:
    """What a job does on its node. submitit calls it, and calls checkpoint() when the place is taken away."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        self._process = self.child.start()
        code = self._process.wait()
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
        if (
            code == STOPPED
            and not is_asked_to_stop(load(Path(self.child.folder)))
            and (_queue_if_it_answers() or {}).get(job, _GONE).state == "RUNNING"
        ):
            # Somebody sent it SIGTERM. A job that was cancelled is no longer running, and is not to come back.
            subprocess.run(["scontrol", "requeue", job], check=True, timeout=60)
            raise SystemExit(STOPPED)  # leaves no result: this was not the end
        return code

    def checkpoint(self) -> Any:
        """Has the training save, and gives what the next attempt does. Runs inside __call__'s wait, as the handler of a
        signal, so it may not wait through Popen, whose lock is taken."""
        import submitit

        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(PointTask(self.child))


class Job(NamedTuple):
    """How SLURM sees a job; GONE where it has forgotten it."""

    state: str
    node: str
    reason: str


class SlurmLauncher:
    """Submits what is not in the queue already, and follows until nothing is left there."""

    def __init__(self, poll_s: float = POLL_S) -> None:
        self._poll_s = poll_s

    def run(self, sweep: Sweep, points: Sequence[Point], report: ReportState) -> None:
        if shutil.which("sbatch") is None or shutil.which("squeue") is None:
            message = "there is no sbatch on this machine: start the sweep on a login node of SLURM, or use --on local."
            raise UserError(message, code="no-cluster")
        try:
            import submitit
        except ImportError:
            message = "--on slurm needs the package submitit: pip install 'rung[slurm]'"
            raise UserError(message, code="not-installed") from None
        if "%" in str(sweep.folder):
            message = f"SLURM reads % in a path as a pattern: move {sweep.folder} to a folder without, by --runs."
            raise UserError(message, code="bad-name")
        executor = submitit.SlurmExecutor(folder=str(sweep.folder / "slurm"), max_num_timeout=MOST_REQUEUES)
        executor.update_parameters(**_parameters(sweep))
        following = _JobTracker(sweep, executor, report, points)
        try:
            following.begin()
            while following.look():
                time.sleep(self._poll_s)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(following.farewell()) from None


class _JobTracker:
    """Points and their jobs. Which job a point has is kept in slurm/jobs.json."""

    def __init__(self, sweep: Sweep, executor: Any, report: ReportState, points: Sequence[Point]) -> None:
        self._sweep, self._executor, self._report = sweep, executor, report
        self._folder = sweep.folder / "slurm"
        self._points = {point.key: point for point in points}  # those that are not at their end
        self._jobs: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError, AttributeError):  # none yet, or damaged: all are submitted
            self._jobs = {str(key): str(job) for key, job in read_json(self._folder / "jobs.json").items()}
        self._reported: dict[str, tuple[str, str]] = {}
        self._starts: Counter[str] = Counter()
        self._missing_since: dict[str, float] = {}

    def begin(self) -> None:
        queue = _queue()
        there = {key for key in self._points if queue.get(self._jobs.get(key, ""), _GONE).state in (*_WAITS, *_RUNS)}
        self._submit([key for key in self._points if key not in there])

    def look(self) -> bool:
        """Reports what is new; False when nothing is running or waiting."""
        queue = _queue_if_it_answers()
        again = []
        for key in list(self._points) if queue is not None else ():
            job = queue.get(self._jobs[key], _GONE) if queue else _GONE
            if job.state in _WAITS:
                self._tell(key, "waiting", job.reason)
            elif job.state in _RUNS:
                self._tell(key, "running", f"{job.node} job {self._jobs[key]}")
            elif self._end(key, job):
                again.append(key)
        self._submit(again)
        return bool(self._points)

    def farewell(self) -> str:
        arrays = sorted({self._jobs[key].partition("_")[0] for key in self._points if key in self._jobs})
        return (
            f"{len(self._points)} jobs of sweep {self._sweep.name} stay with SLURM; the same command follows them "
            f"again, `rung sweep stop {self._sweep.name}` lets them save, `scancel {' '.join(arrays)}` cancels them."
        )

    def _end(self, key: str, job: Job) -> bool:
        """Reports how a job ended that is no longer in the queue; True where the point is to be started again."""
        from submitit.core import utils

        # What submitit leaves at the end: ("success", exit code) or ("error", a traceback).
        outcome: str | None = None
        value: Any = None
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError, pickle.UnpicklingError):
            paths = utils.JobPaths(self._folder, job_id=self._jobs[key], task_id=0)
            with open(paths.result_pickle, "rb") as file:
                outcome, value = _Plain(file).load()
        if outcome is None and job.state not in ("CANCELLED", *_IS_LOST):
            since = self._missing_since.setdefault(key, time.monotonic())
            if time.monotonic() - since < LATE_S:
                return False
        where = f"job {self._jobs[key]}"
        if outcome == "success" and value == FINISHED:
            state = "finished"
        elif job.state == "CANCELLED":
            state, where = "stopped", f"{where} was cancelled"
        elif outcome == "success" and value == STOPPED:
            state = "stopped"
        elif outcome == "success" and value < 0:
            state, where = "lost", f"{where} {signal.Signals(-value).name}"
        elif outcome == "success":
            claim = last_claim(self._sweep, key)
            state, where = "failed", (claim.text if claim else "") or where
        elif outcome == "error":
            state, where = "failed", f"{where}: {_last_line(value)}"
        elif job.state in _IS_LOST:
            state, where = "lost", f"{where} {job.state.lower()}"
        else:
            log = self._folder / f"{self._jobs[key]}_0_log.err"
            state, where = "failed", f"{where} ended as {job.state.lower()} without a word; see {log}"
        self._tell(key, state, where)
        is_again = state in ("stopped", "lost") and job.state != "CANCELLED" and not is_asked_to_stop(self._sweep)
        if is_again and self._starts[key] >= MOST_STARTS:
            is_again = False
            self._tell(key, "failed", f"{state} {MOST_STARTS} times")
        if not is_again:
            del self._points[key]
        return is_again

    def _tell(self, key: str, state: str, where: str) -> None:
        if self._reported.get(key) != (state, where):
            self._reported[key] = state, where
            self._report(key, state, where)

    def _submit(self, keys: Sequence[str]) -> None:
        import submitit

        for at in range(0, len(keys), ARRAY_SIZE):
            some = keys[at : at + ARRAY_SIZE]
            tasks = [PointTask(Child.of(self._sweep, self._points[key])) for key in some]
            try:
                with contextlib.redirect_stderr(io.StringIO()):  # where submitit repeats all that sbatch says
                    jobs = self._executor.submit_array(tasks)
            except submitit.core.utils.FailedJobError as error:
                reasons = re.findall(r"error: (.*)", str(error)) or [_last_line(error)]
                reason = "; ".join(map(one_line, dict.fromkeys(reasons)))
                message = f"sbatch refused the jobs: {reason}; see `launch` in the sweep file."
                raise UserError(message, code="cluster-refused") from None
            for key, job in zip(some, jobs):
                self._jobs[key] = str(job.job_id)
                self._starts[key] += 1
                self._missing_since.pop(key, None)
                self._tell(key, "waiting", f"job {job.job_id}")
            write_json(self._folder / "jobs.json", self._jobs)


_GONE = Job("GONE", "", "")


def _parameters(sweep: Sweep) -> dict[str, Any]:
    """Parameters of sbatch, by submitit's names."""
    needs = Resources.of(sweep)
    path = os.environ.get("PYTHONPATH")  # some clusters start jobs without the environment of whoever submits
    found: dict[str, Any] = {
        "job_name": f"rung-{sweep.name}",
        "time": int_option(sweep, "time", TIME_MIN),
        "nodes": 1,
        "ntasks_per_node": 1,
        "cpus_per_task": int_option(sweep, "cpus_per_task", needs.cpus),
        "gpus_per_node": int_option(sweep, "gpus_per_node", needs.gpus, low=0) or None,
        "mem": f"{math.ceil(needs.mem_gb * 1024)}M" if needs.mem_gb else None,
        "array_parallelism": int_option(sweep, "array_parallelism", ARRAY_SIZE),
        "signal_delay_s": int_option(sweep, "signal_delay_s", SIGNAL_DELAY_S),
        "setup": [*([f"export PYTHONPATH={shlex.quote(path)}"] if path else []), *list_option(sweep, "setup")],
        "additional_parameters": {"requeue": True, **dict_option(sweep, "sbatch")},
        **{name: text_option(sweep, name) for name in ("partition", "account", "qos")},
    }
    # Without a wckey: submitit would give its own, and a cluster that keeps books on them refuses it.
    return {**{name: value for name, value in found.items() if value is not None}, "wckey": None}


def _queue() -> dict[str, Job]:
    """Job id -> how it stands, of all jobs of this user that SLURM remembers."""
    asked = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%T|%N|%r"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        message = "squeue does not answer; see whether SLURM is up: scontrol ping"
        raise RunError(message, code="timeout") from None
    if done.returncode:
        message = f"squeue failed: {_last_line(done.stderr)}; see whether SLURM is up: scontrol ping"
        raise RunError(message, code="no-cluster")
    jobs = {}
    for one in done.stdout.splitlines():
        job, state, node, reason = one.split("|", 3)
        jobs[job] = Job(state.strip(), node, "" if reason == "None" else one_line(reason))
    return jobs


def _queue_if_it_answers() -> dict[str, Job] | None:
    """None while SLURM is silent: a controller that restarts loses no jobs, so that is no reason to stop."""
    try:
        return _queue()
    except RunError:
        return None


def _last_line(text: Any) -> str:
    return one_line(next(reversed(str(text).strip().splitlines()), "no message"))
