"""What the tests of maintenance ask and make."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from rung.runs.maintenance import trash
from rung.runs.maintenance.selection import select
from rung.runs.record import Record

Start = Callable[..., Record]


def git(folder: Path, *args: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    command = [
        "git",
        "-C",
        str(folder),
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@t",
        "-c",
        "commit.gpgsign=false",
        *args,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


def refs(repo: Path) -> dict[str, str]:
    lines = git(repo, "for-each-ref", "--format=%(refname) %(objectname)", "refs/rung").splitlines()
    return dict(line.split() for line in lines)


def remove(root: Path, *refs: str, force: bool = False) -> list[trash.TrashedRun]:
    return trash.remove(select(refs, root), force)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def make_saves(run: Path, *steps: int, num_bytes: int = 100) -> Path:
    folder = run / "checkpoints"
    for step in steps:
        (folder / f"{step:08d}").mkdir(parents=True)
        (folder / f"{step:08d}" / "model.safetensors").write_bytes(b"x" * num_bytes)
        (folder / f"{step:08d}" / "manifest.json").write_text(json.dumps({"step": step}))
    return folder


def age(path: Path, days: float) -> None:
    then = time.time() - days * 86400
    for place in [*path.rglob("*"), path]:
        os.utime(place, (then, then), follow_symlinks=False)
