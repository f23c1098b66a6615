"""The lab: the folder that holds runs/ and data/. From a subfolder it is found upward, as git finds its repository."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def lab() -> Path:
    """The nearest folder, from the working directory upward, with runs or prepared data of rung; else the working
    directory. The search does not leave a git repository, and takes no folder that belongs to another user."""
    here = Path.cwd()
    owners = {os.geteuid(), here.stat().st_uid} if hasattr(os, "geteuid") else set()
    for level, folder in enumerate((here, *here.parents)):
        if _is_lab(folder) and (level == 0 or not owners or folder.stat().st_uid in owners):
            return Path(*[os.pardir] * level)
        if (folder / ".git").exists():
            break
    return Path()


def runs_folder() -> Path:
    """$RUNG_RUNS, else runs/ of the lab."""
    return Path(os.environ.get("RUNG_RUNS") or lab() / "runs")


def data_folder() -> Path:
    """$RUNG_DATA, else data/ of the lab."""
    return Path(os.environ.get("RUNG_DATA") or lab() / "data")


def _is_lab(folder: Path) -> bool:
    """By what lies in them: other programs have folders of these names too."""
    runs = (run for experiment in _folders(folder / "runs") for run in _folders(experiment))
    if any((run / "run.json").is_file() for run in runs):
        return True
    return any(_is_store(one) or any(map(_is_store, _folders(one))) for one in _folders(folder / "data"))


def _is_store(folder: Path) -> bool:
    return (folder / "manifest.json").is_file()


def _folders(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as found:
            yield from (folder / one.name for one in found if one.is_dir())
    except OSError:
        return
