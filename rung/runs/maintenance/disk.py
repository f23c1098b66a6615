"""How much disk a run takes, and by what.

Bytes are the sizes of files, as `ls -l` shows them. A file with several names (a hard link) counts once per run, and
once in a sum over runs. It frees nothing when only one of its names goes, so `freed_bytes` may be less than
`bytes_below`.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR

KINDS = ("checkpoints", "captures", "samples", "metrics", "mirror", "other")
_KIND_OF = {**{name: name for name in KINDS}, "tables": "metrics", "events.ndjson": "metrics"}
Files = dict[tuple[int, int], tuple[int, int]]  # device and inode -> bytes, and how many names the file has


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
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            for stat in _stats(path / name):
                inode = stat.st_dev, stat.st_ino
                if inode not in found.files:
                    found.files[inode] = stat.st_size, stat.st_nlink
                    found.by_kind[_KIND_OF.get(name, "other")] += stat.st_size
    return found


def sum_once(usages: Sequence[Usage]) -> int:
    """Bytes of several runs together, a file that two of them share counted once."""
    together: Files = {}
    for found in usages:
        together.update(found.files)
    return sum(size for size, _ in together.values())


def bytes_below(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; 0 where there is nothing."""
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in _stats(path)}.values())


def freed_bytes(path: Path) -> int:
    """What the disk gets back when `path` goes."""
    stats = list(_stats(path))
    met = Counter((stat.st_dev, stat.st_ino) for stat in stats)
    found = {(stat.st_dev, stat.st_ino): stat for stat in stats}
    return sum(stat.st_size for inode, stat in found.items() if met[inode] >= stat.st_nlink)


def newest(path: Path) -> float:
    """When anything in or below a path was last changed, as a Unix time."""
    return max([os.lstat(path).st_mtime, *(stat.st_mtime for stat in _stats(path, with_folders=True))])


def _stats(path: Path, with_folders: bool = False) -> Iterator[os.stat_result]:
    """Of a file, or of every file below a folder; links are not followed, and what has gone meanwhile is left out."""
    paths: Iterable[str] = [os.fspath(path)]
    if os.path.isdir(path) and not os.path.islink(path):
        paths = (os.path.join(folder, name) for folder, inner, names in os.walk(path) for name in (*names, *inner))
    for found in paths:
        with contextlib.suppress(OSError):
            stat = os.lstat(found)
            if with_folders or not S_ISDIR(stat.st_mode):
                yield stat
