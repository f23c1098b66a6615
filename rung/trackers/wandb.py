"""A run for wandb, through the wandb package, offline unless WANDB_MODE says otherwise.

It lies under <run>/mirror/wandb; `wandb sync` sends it, and sending it again continues the same run there, because the
id is that of the run. Only numbers, the configuration, why, tags and notes go; no code, no console, no machine
statistics. wandb takes only rising steps, so steps that an attempt repeats are missing and counted (a resume writes a
file of its own). It reserves names that begin with "_", so such names are percent-encoded.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from rung.runs.files import named, plain
from rung.trackers.mirror import shown
from rung.trackers.wandblog import is_ended

_ODD = re.compile(r"^[_%]|[\x00-\x1f\x7f]|%(?=[0-9A-Fa-f]{2})")
_WRITE_S = 5.0  # then wandb's own process continues writing
_EMPTY = "%"  # a name that is no text at all
_SETTINGS = {
    "console": "off",
    "silent": True,
    "quiet": True,
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "reinit": "create_new",  # a run of the user's own stays what wandb.run is
    "init_timeout": 60.0,
    "finish_timeout": 8.0,
}


class WandbSink:
    """Feeds a wandb run; see mirror.Sink."""

    name = "wandb"

    def __init__(self, folder: Path, document: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._folder, self._document, self._config = folder, document, config
        self._mode: Any = os.environ.get("WANDB_MODE") or "offline"
        self._project = str((config.get("logging") or {}).get("wandb_project") or document.get("experiment"))
        self._run: Any = None
        self._last_step = -1
        self._notes = str(document.get("why") or "")
        self.num_refused = 0

    def open(self) -> None:
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)  # wandb uses the system's folder for odds and ends otherwise
        known = getattr(wandb.Settings, "model_fields", _SETTINGS)
        self._run = wandb.init(
            mode=self._mode,
            dir=str(self._folder),
            id=wandb_id(self._document),
            resume="allow",
            project=self._project,
            name=str(self._document.get("id")),
            notes=self._notes or None,
            tags=[str(tag) for tag in self._document.get("tags") or () if 1 <= len(str(tag)) <= 64],
            config={**named(plain(self._config)), "rung": _about(self._document)},
            settings=wandb.Settings(**{key: value for key, value in _SETTINGS.items() if key in known}),
        )

    def row(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        if step < self._last_step:
            self.num_refused += 1
            return
        self._last_step = step
        self._run.log({**{outward(name): value for name, value in values.items()}, "_timestamp": unix_s}, step=step)

    def note(self, step: int | None, unix_s: float, text: str) -> None:
        self._notes = f"{self._notes}\n\n{text}".strip()
        self._run.notes = self._notes

    def flush(self) -> None:
        """wandb writes in its own time."""

    def close(self, status: str) -> None:
        self._run.summary["rung_status"] = status
        file = self._run.settings.sync_file if self._mode == "offline" else None
        self._run.finish(exit_code=0 if status in ("finished", "stopped", "running") else 1)
        give_up = time.monotonic() + _WRITE_S
        while file and not is_ended(Path(file)) and time.monotonic() < give_up:  # finish() does not wait for the file
            time.sleep(0.02)

    def summary_line(self) -> str:
        if self._mode != "offline":
            return f"mirror: wandb, {self._mode}, as {self._project}/{wandb_id(self._document)}"
        folder = shlex.quote(shown(self._folder / "wandb"))
        return f"mirror: wandb sync {folder}/offline-run-*-{wandb_id(self._document)}"


def wandb_id(document: Mapping[str, Any]) -> str:
    """The same for a run wherever it lies; a run that has no uid gets one out of its name and its time."""
    text = f"{document.get('id')} {document.get('created')}"
    return str(document.get("uid") or hashlib.sha256(text.encode()).hexdigest()[:32])


def outward(name: str) -> str:
    """The name of a metric as wandb takes it; `inward` is its inverse."""
    if not name:
        return _EMPTY
    return _ODD.sub(lambda match: f"%{ord(match[0]):02X}", name)


def inward(name: str) -> str:
    return "" if name == _EMPTY else unquote(name, errors="backslashreplace")


def _about(document: Mapping[str, Any]) -> dict[str, Any]:
    """What wandb has no field for."""
    kept = ("id", "uid", "parent", "recipe", "preset", "seed", "command", "created", "derived")
    return dict(named({key: document.get(key) for key in kept}))
