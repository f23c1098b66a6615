"""Runs and trees of files to push and pull, made without training anything."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from rung.remote.manifest import FileEntry
from rung.remote.snapshot import Snapshot
from rung.runs.query import Run, open_run
from rung.runs.record import Record


def tree(folder: Path, files: Mapping[str, bytes], name: str = "tunes", uid: str = "") -> Snapshot:
    """A data set out of any files, written to a folder."""
    entries = []
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
        entries.append(FileEntry(path, len(data), hashlib.sha256(data).hexdigest()))
    uid = uid or hashlib.sha256(repr(sorted((e.path, e.sha256) for e in entries)).encode()).hexdigest()[:16]
    return Snapshot("data", name, uid, tuple(entries), {entry.path: folder / entry.path for entry in entries})


def contents(folder: Path) -> dict[str, bytes]:
    """Path -> bytes of every file below a folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def start(root: Path, experiment: str = "piano", why: str | None = None) -> Record:
    """A run that is going on."""
    names = {"recipe": "piano", "preset": None, "command": ["rung", "train"], "seed": 1}
    more = {"config": {"lr": {"learning_rate": 1e-3}}, "sources": {}, "derived": {}, "data": {}, "why": why}
    return Record.create(root, experiment, **names, **more)  # type: ignore[arg-type]


def steps(record: Record, first: int, last: int) -> None:
    for step in range(first, last):
        record.log(step, {"loss": 3.0 - step / 100})


def save(path: Path, step: int, num_bytes: int = 2000, is_best: bool = False) -> Path:
    """A checkpoint as the engine leaves one: beside, then renamed."""
    folder = path / "checkpoints" / f"{step:08d}"
    beside = folder.with_name(f".{step:08d}.1.tmp")
    beside.mkdir(parents=True)
    files = {"model.safetensors": os.urandom(num_bytes), "optimizer.pt": os.urandom(num_bytes), "state.json": b"{}"}
    for name, data in files.items():
        (beside / name).write_bytes(data)
    specs = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    (beside / "manifest.json").write_text(json.dumps({"step": step, "files": specs}))
    beside.rename(folder)
    if is_best:
        (folder.parent / "best").write_text(f"{step}\n")
    return folder


def finished(root: Path, saves: tuple[int, ...] = (10, 20), best: int | None = 10, experiment: str = "piano") -> Run:
    """A run of twenty steps that has ended."""
    record = start(root, experiment, why="does it go up?")
    steps(record, 0, 20)
    for step in saves:
        save(record.path, step, is_best=step == best)
    record.add_sample(20, "tune é.mid", b"MThd", "a tune")
    record.finish("finished", best={"step": 10, "set": "val", "loss": 2.5})
    return open_run(record.id, root)
