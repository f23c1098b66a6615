"""Sweeps on Ray: each point's command is a task, placed wherever the cluster has room for it.

A point that was on a lost node, or whose worker was killed, is placed again and continues from its checkpoint; one that
is lost too often is given up. The driver does these retries, not Ray, so that it can report them. Ctrl-C asks every
training to save and stop, and waits. A training over several processes stays on one node, under torchrun.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rung.errors import ConfigError, RunError, UserError
from rung.sweep.launch import ReportState, Resources, dict_option
from rung.sweep.launch.child import Child
from rung.sweep.point import FINISHED, STOPPED, handling
from rung.sweep.space import Point, Sweep
from rung.sweep.state import is_asked_to_stop, last_claim
from rung.text import one_line

POLL_S = 0.5
MOST_STARTS = 20  # of one point: something that is lost twenty times is not lost by chance
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported home
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # no environment is built for each task
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # or the pages that a lost node leaves are printed amid the sweep's table
}
REACH_S = 10.0
STORE_BYTES = 80 * 2**20  # nothing but exit codes travels through Ray


class RayLauncher:
    """address: `auto`, `host:port` and `ray://host:port` join a cluster, and so does None where RAY_ADDRESS names one;
    otherwise one is started here, for as long as the sweep takes."""

    def __init__(self, address: str | None = None) -> None:
        self.address = address

    def run(self, sweep: Sweep, points: Sequence[Point], report: ReportState) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError:
            message = "--on ray needs the package ray: pip install 'rung[ray]'"
            raise UserError(message, code="not-installed") from None
        wanted = _resources(sweep)
        children = [(point, Child.of(sweep, point)) for point in points]

        def stop(number: int, frame: FrameType | None) -> None:  # as Ctrl-C does; Ray would print a trace and abort
            signal.signal(number, signal.SIG_IGN)
            raise KeyboardInterrupt

        with _cluster(ray, self.address) as is_own:
            lack = _lack(ray.nodes(), wanted)
            if lack and is_own:
                message = f"{lack}; ask for less under `launch`, or join a larger cluster: --on ray://HOST:PORT."
                raise UserError(message, code="too-large")
            own = {f"num_{name.lower()}s": wanted.pop(name) for name in ("CPU", "GPU")}
            task = ray.remote(max_retries=0, memory=wanted.pop("memory"), resources=wanted, **own)(run_point)
            with handling(stop, signal.SIGTERM, signal.SIGHUP):
                _Placement(ray, task, sweep, report, lack).run(children)


def run_point(child: Child, sign: str) -> int | str:
    """On a node: starts a point, passes on what stops it, and returns its exit code, or why it cannot start here."""
    # Ray cancels by an interrupt, which does nothing in workers of a cluster that was started with it ignored (nohup).
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = child.start()
    except OSError as error:
        return str(error)
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    is_told = False
    try:
        Path(sign).write_text(f"{os.uname().nodename} pid {process.pid}", "utf-8")
        while True:
            try:
                return process.wait(timeout=POLL_S)
            except subprocess.TimeoutExpired:
                continue
            except KeyboardInterrupt:  # how Ray cancels, and it says so again every few seconds
                if not is_told:
                    process.terminate()
                is_told = True
    finally:
        signal.signal(signal.SIGTERM, before)


class _Placement:
    """Points on their way through a cluster. A file in `signs` says that a task runs, and where."""

    def __init__(self, ray: Any, task: Any, sweep: Sweep, report: ReportState, lack: str) -> None:
        self._ray, self._task, self._sweep, self._report, self._lack = ray, task, sweep, report, lack
        self._signs = sweep.folder / "ray"
        self._going: dict[Any, tuple[Point, Child, Path]] = {}
        self._where: dict[str, str] = {}  # key -> node, of those that are known to run
        self._starts: Counter[str] = Counter()

    def run(self, children: Sequence[tuple[Point, Child]]) -> None:
        self._signs.mkdir(parents=True, exist_ok=True)
        try:
            for point, child in children:
                self._place(point, child)
            while self._going:
                self._look()
        except BaseException:  # every training saves and ends before we do; a second Ctrl-C does not wait
            for task in list(self._going):
                self._ray.cancel(task)
            while self._going:
                self._look(is_stopping=True)
            raise

    def _place(self, point: Point, child: Child) -> None:
        sign = self._signs / f"{point.key}.{uuid.uuid4().hex[:8]}"
        self._starts[point.key] += 1
        self._going[self._task.remote(child, str(sign))] = point, child, sign
        self._report(point.key, "waiting", self._lack)

    def _look(self, is_stopping: bool = False) -> None:
        """Waits a moment and reports what is new; a point that was stopped or lost is placed again."""
        done, _ = self._ray.wait(list(self._going), timeout=POLL_S)
        there = set(os.listdir(self._signs))
        for point, _, sign in self._going.values():
            if sign.name in there and point.key not in self._where:
                self._where[point.key] = sign.read_text("utf-8")
                self._report(point.key, "running", self._where[point.key])
        for task in done:
            point, child, sign = self._going.pop(task)
            sign.unlink(missing_ok=True)
            where = self._where.pop(point.key, "")
            try:
                end = self._ray.get(task)  # an exit code, or why the point cannot start there
            except self._ray.exceptions.TaskCancelledError:
                end = STOPPED
            except self._ray.exceptions.RayTaskError:
                raise  # a fault of run_point, which is ours
            except self._ray.exceptions.RayError as error:
                end = error
            if isinstance(end, str) and not is_stopping:
                raise RunError(end, code="no-folder")
            if isinstance(end, str):
                state, where = "failed", end
            elif isinstance(end, Exception) or end < 0:
                why = type(end).__name__ if isinstance(end, Exception) else signal.Signals(-end).name
                state, where = "lost", f"{where} {why}".strip()
            elif end in (FINISHED, STOPPED):
                state = "finished" if end == FINISHED else "stopped"
            else:
                claim = last_claim(self._sweep, point.key)
                state, where = "failed", (claim.text if claim else "") or where
            self._report(point.key, state, where)
            if is_stopping or state not in ("stopped", "lost") or is_asked_to_stop(self._sweep):
                continue
            if self._starts[point.key] < MOST_STARTS:
                self._place(point, child)
            else:
                self._report(point.key, "failed", f"{state} {MOST_STARTS} times")


@contextlib.contextmanager
def _cluster(ray: Any, address: str | None) -> Iterator[bool]:
    """Joins a cluster, or starts one that ends with the sweep; yields whether it is our own."""
    if ray.is_initialized():
        yield False
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    is_own = address == "local"
    options = {"include_dashboard": False, "object_store_memory": STORE_BYTES} if is_own else {}
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if host and port.isdecimal():  # where nobody listens, Ray itself would try for more than ten minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = one_line(next(iter(str(error).strip().splitlines()), type(error).__name__))
        message = f"no Ray cluster answers at {one_line(address)}: {reason}; ask it with `ray status` on its head node."
        if is_own:
            message = f"no Ray cluster could be started on this machine: {reason}; try --on local."
        raise RunError(message, code="no-cluster") from None
    try:
        yield is_own
    finally:
        ray.shutdown()


def _resources(sweep: Sweep) -> dict[str, float]:
    """What a point takes, by Ray's names."""
    needs = Resources.of(sweep)
    own = {"CPU": needs.cpus, "GPU": needs.gpus, "memory": (needs.mem_gb or 0) * 2**30}
    more = dict_option(sweep, "resources")
    for name, value in more.items():
        if name in own or isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(
                f"launch: resources: {one_line(name)}={one_line(value)} is not a custom resource with an amount, "
                "such as {a100: 1}; CPUs, GPUs and memory are threads, gpus and mem_gb.",
                code="bad-value",
            )
    return {**own, **more}


def _lack(nodes: Sequence[Mapping[str, Any]], wanted: Mapping[str, float]) -> str:
    """Why no node could ever take a point; empty where one can."""
    have = [node["Resources"] for node in nodes if node["Alive"]]
    if any(all(one.get(name, 0) >= amount for name, amount in wanted.items()) for one in have):
        return ""
    asked = ", ".join(f"{amount:g} {name}" for name, amount in wanted.items() if amount)
    return f"no node of this Ray cluster has {asked}"
