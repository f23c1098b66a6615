"""What a run ran on: python, packages, processor, memory, GPUs and driver.

Nothing is imported to find out; versions come from the packages' metadata, GPUs from nvidia-smi, and what only torch
can know is handed in as `device`. The process environment is never stored: it is where people keep their secrets.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_SMI_TIMEOUT_S = 5.0


def environment(device: dict[str, Any] | None = None) -> dict[str, Any]:
    """The contents of env.json."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory_bytes: int | None = None
    with contextlib.suppress(ValueError, OSError):
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": {"model": _cpu_model(), "count": os.cpu_count(), "usable": usable},
        "memory_bytes": memory_bytes,
        "gpus": _gpus(),
        "device": device or {},
        "rung_sha256": own_source(),
        "packages": packages(),
    }


@functools.cache  # 60 ms for 64 packages, and they do not change under a process
def packages() -> dict[str, str]:
    """Every installed distribution, by name."""
    found = {str(d.metadata["Name"]): d.version for d in metadata.distributions() if d.metadata["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


@functools.cache  # 12 ms, and the code that runs was read before
def own_source() -> str:
    """A hash of rung's own modules: a checkout that is being worked on has one version and many states."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        with contextlib.suppress(OSError):
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model", "Hardware")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[dict[str, str]]:
    """Empty without nvidia-smi, or where it does not answer in time."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [{"name": row[0], "driver": row[1], "memory": row[2]} for row in rows if len(row) == 3]
