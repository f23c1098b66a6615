"""Runs a point's command as the child of a process that an engine placed on some node.

The child gets the working folder, the Python path and the RUNG_ variables of the driver, and otherwise the environment
of the node. It stops with the process that started it, however that ends, so a lost node leaves no orphan that trains
on. It ignores SIGUSR2, which SLURM sends to every process of a job before its time is up; the parent catches that
signal and sends the child SIGTERM.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rung.sweep.launch import int_option
from rung.sweep.point import command_of, dies_with_parent
from rung.sweep.space import Point, Sweep


@dataclass(frozen=True)
class Child:
    """All that a node needs to know to start a point. Made by the driver, sent to the node."""

    command: tuple[str, ...]
    folder: str  # of the sweep
    cwd: str
    env: dict[str, str]

    @classmethod
    def of(cls, sweep: Sweep, point: Point) -> Child:
        env = {name: value for name, value in os.environ.items() if name.startswith("RUNG_") or name == "PYTHONPATH"}
        threads = str(int_option(sweep, "threads", 1))
        env |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        return cls(tuple(command_of(sweep, point)), str(sweep.folder), os.getcwd(), env)

    def start(self) -> subprocess.Popen[bytes]:
        """Raises OSError with a sentence where this node does not see what it needs."""
        for needed in (Path(self.folder, "sweep.json"), Path(self.cwd), Path(self.command[0])):
            if not needed.exists():
                raise OSError(
                    f"node {socket.gethostname()} does not see {needed}: the runs folder, the working folder and the "
                    "Python of a sweep must lie on storage that all nodes share; start it from such a folder, with "
                    "--runs on such a folder."
                )
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        tie = dies_with_parent()

        def between_fork_and_exec() -> None:
            if tie is not None:
                tie()
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)

        return subprocess.Popen(
            self.command,
            cwd=self.cwd,
            env={**env, **self.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the point keeps its own log
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=between_fork_and_exec,
        )
