"""The code of a run outside git: one archive of the source-like files below a folder.

The same files give the same bytes, so two archives can be compared by hash. Data, weights and anything hidden stay out,
and the walk has limits: a run started in a home folder must not spend minutes packing it. What was left out is listed.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rung.files import write_whole

SOURCE_SUFFIXES = frozenset(
    {".py", ".pyi", ".pyx", ".ipynb", ".yaml", ".yml", ".toml", ".json", ".cfg", ".ini", ".md", ".rst", ".txt", ".sh"}
    | {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go", ".js", ".ts", ".html", ".css", ".sql", ".lock"}
)
SOURCE_NAMES = frozenset({"Makefile", "Dockerfile", "LICENSE"})
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "venv", "site-packages", "build", "dist", "wandb"})
_FILE_BYTES = 1_000_000
_TOTAL_BYTES = 50_000_000
_NUM_SEEN = 50_000


def is_source(name: str) -> bool:
    return name in SOURCE_NAMES or os.path.splitext(name)[1].lower() in SOURCE_SUFFIXES


def pack(root: Path, out: Path, exclude: Sequence[Path] = ()) -> dict[str, Any]:
    """Writes the archive to `out` and says what is in it."""
    left_out: list[str] = []
    buffer = io.BytesIO()
    num_files = total = 0
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in _sources(root, [p.resolve() for p in exclude], left_out):
            name = path.relative_to(root).as_posix()
            try:
                data = path.read_bytes()
            except OSError:
                left_out.append(f"{name} (cannot be read)")
                continue
            if len(data) > _FILE_BYTES or total + len(data) > _TOTAL_BYTES:
                left_out.append(f"{name} (too large)")
                continue
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
            num_files, total = num_files + 1, total + len(data)
    data = buffer.getvalue()
    write_whole(out, data)
    return {
        "kind": "tar",
        "file": out.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "num_files": num_files,
        "left_out": left_out[:200],
    }


def _sources(root: Path, exclude: Sequence[Path], left_out: list[str]) -> Iterator[Path]:
    num_seen = 0
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        if {"manifest.json", "index.jsonl"} <= set(names):  # prepared data
            folders.clear()
            continue
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in _SKIPPED_FOLDERS and (here / name).resolve() not in exclude
        )
        for name in sorted(names):
            num_seen += 1
            if num_seen > _NUM_SEEN:
                left_out.append(f"all after {num_seen - 1} files ({here} and beyond)")
                return
            path = here / name
            if not name.startswith(".") and is_source(name) and path.is_file() and not path.is_symlink():
                yield path
