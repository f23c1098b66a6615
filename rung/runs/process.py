"""Whether the process that wrote a run is still there.

A status field lies after kill -9, and a pid lies after it is handed out again, so a process is known by host, boot,
pid namespace, pid and the moment it started. From another machine only the heartbeat can be seen: a thread of the
process beats, so that it also does during a long eval, save or compilation.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

BEAT_S = 2.0  # between signs of life
SILENT_S = 30.0  # without one for so long, the machine is taken for lost
HEARTBEAT = "heartbeat"


class Liveness(NamedTuple):
    """`word` is running, vanished or silent; `text` says why."""

    word: str
    text: str


def this_process() -> dict[str, Any]:
    pid = os.getpid()
    namespace = boot_id = None  # not Linux
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = socket.gethostname()
    return {"pid": pid, "host": host, "boot_id": boot_id, "namespace": namespace, "started": start_time(pid)}


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of the process; None when it is gone, or a zombie, or this is not Linux."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rfind(")") + 2 :].split()  # the name, in brackets, may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def liveness(process: dict[str, Any] | None, heartbeat: float | None, now_s: float | None = None) -> Liveness:
    """What became of a process that recorded itself as running; `heartbeat` is the time of its last sign of life.

    `now_s` is for somebody who has asked the disk for the time: the clocks of two machines can be a minute apart.
    """
    if not process or not isinstance(process.get("pid"), int):
        return _by_heartbeat("an unknown host", heartbeat, now_s)
    here = this_process()
    pid, host = process["pid"], str(process.get("host"))
    if host != here["host"]:
        return _by_heartbeat(f"host {host}", heartbeat, now_s)
    if process.get("boot_id") != here["boot_id"]:
        booted = None
        with contextlib.suppress(OSError):
            lines = Path("/proc/stat").read_text().splitlines()
            booted = next((float(line.split()[1]) for line in lines if line.startswith("btime ")), None)
        if heartbeat is not None and booted is not None and heartbeat > booted:
            return _by_heartbeat(f"another machine named {host}", heartbeat, now_s)
        return Liveness("vanished", f"{host} was restarted while it ran")
    if process.get("namespace") != here["namespace"]:
        return _by_heartbeat(f"another container on {host}", heartbeat, now_s)
    if here["boot_id"] is not None:
        now, started = start_time(pid), process.get("started")
        is_alive = now is not None and (started is None or now == started)
    else:  # no /proc: all that can be asked is whether the number is in use
        try:
            os.kill(pid, 0)
            is_alive = True
        except ProcessLookupError:
            is_alive = False
        except PermissionError:
            is_alive = True
    if is_alive:
        return Liveness("running", f"process {pid} on {host}")
    return Liveness("vanished", f"process {pid} on {host} is gone")


def _by_heartbeat(where: str, heartbeat: float | None, now_s: float | None) -> Liveness:
    from rung.units import duration

    if heartbeat is None:
        return Liveness("silent", f"on {where}, which cannot be seen from here; it never sent a heartbeat")
    age_s = max(0.0, (time.time() if now_s is None else now_s) - heartbeat)
    if age_s < SILENT_S:
        return Liveness("running", f"on {where}, last sign of life {duration(age_s)} ago")
    return Liveness("silent", f"on {where}, which cannot be seen from here; silent for {duration(age_s)}")
