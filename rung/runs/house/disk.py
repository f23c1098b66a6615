"""How much disk a run takes, and by what.

Bytes are the sizes of files, as `ls -l` shows them, and links are not followed. A file with several names (a hard link)
counts once per run, and once in a sum over runs.

The surprising thing: a file that has another name elsewhere frees nothing when one of its names goes, so `freed_bytes`
may be less than `bytes_below`.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

KINDS = ("checkpoints", "captures", "samples", "metrics", "mirror", "other")
_KIND_OF = {**{name: name for name in KINDS}, "tables": "metrics", "events.ndjson": "metrics"}
File = tuple[tuple[int, int], tuple[int, int]]  # device and inode; bytes, and how many names it has
Files = dict[tuple[int, int], tuple[int, int]]


@dataclass
class Usage:
    """Bytes of one run by kind. `files` is kept so that sums over runs can count a shared file once."""

    id: str
    by_kind: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    files: Files = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


def usage(path: Path, run_id: str) -> Usage:
    found = Usage(run_id)
    for entry in _entries(os.fspath(path)):
        kind = _KIND_OF.get(entry.name, "other")
        for inode, size_and_names in _files(entry):
            if inode not in found.files:
                found.files[inode] = size_and_names
                found.by_kind[kind] += size_and_names[0]
    return found


def sum_once(usages: Sequence[Usage]) -> int:
    """Bytes of several runs together, a file that two of them share counted once."""
    together: Files = {}
    for found in usages:
        together.update(found.files)
    return sum(size for size, _ in together.values())


def bytes_below(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; 0 where there is nothing."""
    return sum({inode: size for inode, (size, _) in _below(path)}.values())


def freed_bytes(path: Path) -> int:
    """What the disk gets back when `path` goes."""
    found = list(_below(path))
    met = Counter(inode for inode, _ in found)
    return sum(size for inode, (size, num_names) in dict(found).items() if met[inode] >= num_names)


def newest(path: Path) -> float:
    """When anything in or below a path was last changed, as a Unix time."""
    latest = os.lstat(path).st_mtime
    for folder, _, names in os.walk(path):
        for place in (folder, *(os.path.join(folder, name) for name in names)):
            with contextlib.suppress(OSError):  # gone in the meantime
                latest = max(latest, os.lstat(place).st_mtime)
    return latest


def _below(path: Path) -> Iterator[File]:
    if path.is_dir() and not path.is_symlink():
        for entry in _entries(os.fspath(path)):
            yield from _files(entry)
        return
    with contextlib.suppress(OSError):
        yield _file(os.lstat(path))


def _files(entry: os.DirEntry[str]) -> Iterator[File]:
    if entry.is_dir(follow_symlinks=False):
        for inner in _entries(entry.path):
            yield from _files(inner)
        return
    with contextlib.suppress(OSError):  # gone in the meantime
        yield _file(entry.stat(follow_symlinks=False))


def _file(stat: os.stat_result) -> File:
    return (stat.st_dev, stat.st_ino), (stat.st_size, stat.st_nlink)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []
