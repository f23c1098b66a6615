"""The embedded data of the world recipe: seeded walks through Freedoom maps in ViZDoom.

A map is walked again and again, each time another way from the same start, so that some walks can be held out of a
place that the others know. The same seed, maps and sizes give the same bytes on one platform, and a walk does not
depend on the others. A recorder process per walk works in a temporary folder, so ViZDoom is never imported here. The
engine draws heights 1.2 times too tall, as on the screens of 1993, and shifts the picture instead of turning it to look
up or down; poses have the angle that was asked for.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rung.data.wheel import VIZDOOM
from rung.errors import ConfigError, DataError
from rung.random import key_of
from rung.recipe import Report
from rung.recipes.world import config
from rung.recipes.world.geometry import from_angles
from rung.recipes.world.sources.episode import Episode
from rung.recipes.world.walk.walker import CONTROLS

PLACE, UNSEEN = ["E1M5"], ["E2M9"]  # both bright and rich in texture, so that they can be compared
WALK_FRAMES = 500  # of one walk: long enough to leave the room, short enough to hold two of them out
MAPS = [f"E{episode}M{number}" for episode in range(1, 5) for number in range(1, 10)]
MAPS += [f"map{number:02d}" for number in range(1, 33)]
# What ViZDoom can draw with square pixels: 4:3 and 16:9
SIZES = [(w, w * 3 // 4) for w in (160, 200, 256, 320, 400, 512, 640, 800, 1024, 1280, 1400, 1600)]
SIZES += [(w, w * 9 // 16) for w in (256, 320, 400, 512, 640, 800, 1024, 1280, 1600, 1920)]
WIDE = 256  # drawn no smaller than this, and averaged down: far walls flicker otherwise
TIC_S = 1 / 35


def walk_episodes(cfg: config.Dataset, seed: int, report: Report) -> Iterator[Episode]:
    """Walks of `cfg.num_frames` frames in all, map by map; frames have the config's size wherever ViZDoom can be
    averaged down to it exactly, and else a larger one. A walk is one episode, or more where it was cut short."""
    maps, unseen = check_maps(cfg.maps, cfg.unseen_maps)
    width, height, factor = drawn_size(cfg.width, cfg.height)
    # The unseen maps get a twelfth each: enough to evaluate on, and it is nothing to learn from.
    beside = {name: cfg.num_frames // 12 for name in unseen}
    num_frames = cfg.num_frames - sum(beside.values())
    shares = {name: share for name, share in zip(maps, divide(num_frames, len(maps)))} | beside
    package = find_package(report)
    waiting: deque[dict[str, Any]] = deque()
    for name, share in shares.items():
        walks = divide(share, max(1, share // WALK_FRAMES))
        for number, length in enumerate(walks):
            waiting.append({
                "package": str(package), "wad": "freedoom1.wad" if name.startswith("E") else "freedoom2.wad",
                "map": name, "label": f"{name} walk {number + 1}" if len(walks) > 1 else name,
                "seed": key_of(seed, "walk", name, *([number] if number else [])), "width": width, "height": height,
                "factor": factor, "num_frames": length, "split": "unseen" if name in beside else None,
            })  # fmt: skip
    running: deque[Recording] = deque()
    num_done = 0
    try:
        while waiting or running:
            while waiting and len(running) < min(2, os.cpu_count() or 1):
                running.append(Recording(waiting.popleft()))
            recording = running.popleft()
            try:
                for now in recording.wait():
                    report(f"walking in {recording.job['label']}", num_done + now, cfg.num_frames)
                yield from recording.episodes()
            finally:
                recording.close()
            num_done += recording.job["num_frames"]
        report("walking", num_done, cfg.num_frames)
    finally:
        for recording in running:
            recording.close()


def divide(total: int, num_parts: int) -> list[int]:
    """Nearly equal parts."""
    return [total // num_parts + (place < total % num_parts) for place in range(num_parts)]


def check_maps(maps: Sequence[str], unseen: Sequence[str]) -> tuple[list[str], list[str]]:
    """The maps to learn from and those only to evaluate on, spelled as we do."""
    spelled = {name.lower(): name for name in MAPS}
    for key, wanted in (("maps", maps), ("unseen_maps", unseen)):
        for name in wanted:
            if name.lower() not in spelled:
                raise ConfigError(
                    f"dataset.{key}: Freedoom has no map {name!r}, only E1M1 to E4M9 and map01 to map32", code="no-map"
                )
    beside = [spelled[name.lower()] for name in unseen or ([] if maps else UNSEEN)]
    chosen = [spelled[name.lower()] for name in maps or PLACE]
    named = chosen + beside
    if len(set(named)) < len(named):
        twice = next(name for name in named if named.count(name) > 1)
        raise ConfigError(
            f"dataset.maps={list(maps)} dataset.unseen_maps={list(unseen)}: {twice} is there twice; name each map once",
            code="bad-value",
        )
    if len(beside) > 6:
        raise ConfigError(
            f"dataset.unseen_maps names {len(beside)} maps; each gets a twelfth of the frames, so 6 are the most",
            code="bad-value",
        )
    return chosen, beside


def drawn_size(width: int, height: int) -> tuple[int, int, int]:
    """In which size to draw, and by what to shrink: a multiple of the wanted size, else 1 and whatever covers it."""
    for w, h in sorted(SIZES):
        if w >= WIDE and w % width == 0 and (w // width * height) == h:
            return w, h, w // width
    for w, h in sorted(SIZES, key=lambda size: size[0] * size[1]):
        if w >= max(width, WIDE) and h >= height:
            return w, h, 1
    raise ConfigError(
        f"dataset.width={width} dataset.height={height}: the embedded walk has at most 1600x1200 or 1920x1080 pixels; "
        "choose a smaller size, or record your own and pass --from",
        code="too-large",
    )


def find_package(report: Report) -> Path:
    """The folder to import vizdoom from: of an installed one, else of the pinned wheel, unpacked in the cache."""
    spec = importlib.util.find_spec("vizdoom")
    if spec is not None and spec.origin:
        return Path(spec.origin).parents[1]
    wheel = VIZDOOM.get(f"cp{sys.version_info.major}{sys.version_info.minor}")
    if wheel is None or sys.platform != "linux" or platform.machine() != "x86_64":
        raise DataError(
            f"no pinned vizdoom for Python {platform.python_version()} on {sys.platform} {platform.machine()}; "
            "`pip install vizdoom==1.3.2`, or pass --from a folder with videos",
            code="not-installed",
        )
    return wheel.unpack(report)


class Recording:
    """A recorder process at work in its folder, and what it leaves there."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.frame_shape = job["height"] // job["factor"], job["width"] // job["factor"], 3
        self.folder = tempfile.TemporaryDirectory(prefix="rung-walk-", ignore_cleanup_errors=True)
        self.path = Path(self.folder.name)
        self.log = (self.path / "log.txt").open("w+b")
        root = Path(__file__).parents[4]  # so that the recorder finds this very rung, wherever we were started
        paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rung.recipes.world.walk.recorder", json.dumps(job)],
            cwd=self.path, env={**os.environ, "PYTHONPATH": paths}, stdin=subprocess.DEVNULL,
            stdout=self.log, stderr=self.log,
            start_new_session=True,  # a group of its own, so that the engine ends with its recorder
        )  # fmt: skip

    def wait(self) -> Iterator[int]:
        """Until the recorder is done; yields the number of frames there are by now."""
        while True:
            try:
                code = self.process.wait(timeout=0.25)
                break
            except subprocess.TimeoutExpired:
                frames = self.path / "frames.bin"
                yield frames.stat().st_size // int(np.prod(self.frame_shape)) if frames.exists() else 0
        if code != 0 or not (self.path / "steps.npy").exists():
            self.log.seek(0)
            lines = self.log.read().decode("utf-8", "replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")
            raise DataError(
                f"the walk in {self.job['label']} broke off ({last}); try other dataset.maps, or pass --from a folder "
                "with videos",
                code="walk-failed",
            )

    def episodes(self) -> Iterator[Episode]:
        steps = np.load(self.path / "steps.npy")
        # Mapped, so that frames stay readable after the folder is gone, for as long as somebody holds the episode.
        frames = np.memmap(self.path / "frames.bin", np.uint8, "r", shape=(len(steps), *self.frame_shape))
        for life in np.unique(steps["life"]):
            (rows,) = np.nonzero(steps["life"] == life)
            lived, first = steps[rows], int(rows[0])
            yield Episode(
                label=self.job["label"],
                split=self.job["split"],
                times=lived["tic"] * TIC_S,
                frames=frames[first : first + len(rows)],
                poses=from_angles(lived["pose"]),
                up=(0.0, 0.0, 1.0),
                controls=lived["control"],
                control_names=list(CONTROLS),
            )

    def close(self) -> None:
        if self.process.poll() is None:
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
            self.process.wait()
        self.log.close()
        self.folder.cleanup()
