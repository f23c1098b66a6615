"""How the code of two runs differs, out of their snapshots: uncommitted and untracked files included."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Changed(NamedTuple):
    """A file that differs; `status` is M, A or D, and lines are counted as git does (None for a binary file)."""

    status: str
    path: str
    added: int | None
    removed: int | None


@dataclass
class CodeDiff:
    """`problem` says why nothing could be compared; then `files` is empty, and that does not mean that all is equal."""

    files: list[Changed] = field(default_factory=list)
    patch: str = ""
    problem: str = ""
    notes: list[str] = field(default_factory=list)  # files that no snapshot holds, code that changed on a resume
