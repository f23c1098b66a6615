"""Whole stores of kind "world", made of synthetic films without the recipe's own preparation.

The truth is known twice over: from the film, and because a shift of the controls against the frames can be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rung.data.store import StoreWriter
from tests.recipes.world.synthetic import Film, film

NAMES = ("right", "down", "forward", "look_up", "turn_right", "lean_right", "roll", "pitch", "dt", "valid")
INTENTS = {"forward": ["forward", 1], "right": ["right", 1], "turn": ["turn_right", 1], "look": ["look_up", 1]}


def write_store(
    path: Path,
    num_frames: Sequence[int] = (400, 200),
    seed: int = 0,
    height: int = 48,
    width: int = 64,
    splits: Sequence[str] = ("train", "validation"),
    shift: int = 0,
    change: Callable[[int, Film], Film] | None = None,
) -> Path:
    """One episode per entry of `num_frames`, its split from `splits` (the last one repeats).

    With `shift` = n, row t has the controls that led to frame t - n: they come n frames too late. `change(episode,
    film)` may spoil a film before its controls are computed.
    """
    films = [film(number, seed + k, height, width) for k, number in enumerate(num_frames)]
    films = [change(k, each) if change else each for k, each in enumerate(films)]
    names = [splits[min(k, len(splits) - 1)] for k in range(len(films))]
    rows = [moved(controls_of(each), shift) for each in films]
    return write_films(path, films, rows, names)


def write_films(
    path: Path, films: Sequence[Film], rows: Sequence[np.ndarray], splits: Sequence[str], **info: Any
) -> Path:
    """A store of these films, one episode each, with these controls; `info` stands in for what it would say of them."""
    height, width = films[0].frames.shape[1:3]
    divisors = divisors_of(height, width)
    train = np.concatenate([each.frames for each, split in zip(films, splits) if split == "train"])
    mean_frame = np.floor(train.astype(np.float64).mean(0) + 0.5).astype(np.uint8)
    with StoreWriter(path, "world") as store:
        for d in divisors:
            store.array("frames" if d == 1 else f"frames_{d}", np.uint8, (height // d, width // d, 3))
        store.array("times", np.float64)
        store.array("poses", np.float64, (4, 4))
        store.array("controls", np.float32, rows[0].shape[1:])
        store.array("mean_frame", np.uint8, (height, width, 3))
        for k, (each, controls, split) in enumerate(zip(films, rows, splits)):
            start = store.append("frames", each.frames)
            for d in divisors[1:]:
                store.append(f"frames_{d}", shrunk(each.frames, d))
            store.append("times", each.times)
            store.append("poses", each.poses)
            store.append("controls", controls)
            store.record(split, start, len(each.frames), episode=k, label=f"film {k}")
        store.append("mean_frame", mean_frame[None])
        store.info = {
            "height": height,
            "width": width,
            "divisors": divisors,
            "controls": list(NAMES),
            "control_kind": "pose",
            "intents": INTENTS,
            "statistics": statistics(
                np.concatenate([controls for controls, split in zip(rows, splits) if split == "train"]),
                info.get("controls", NAMES),
            ),
            "up": [0.0, -1.0, 0.0],
            "rate_hz": 1 / float(np.median(np.diff(films[0].times))),
            "baselines": baselines(films, splits, mean_frame),
            "source": "synthetic films",
            "settings": {},
            "dropped": {},
            "summary": f"{sum(len(each.frames) for each in films)} synthetic frames",
            **info,
        }
    return path


def controls_of(each: Film) -> np.ndarray:
    """(N, 10) float32, per the contract of the store."""
    rows = np.zeros((len(each.frames), len(NAMES)), np.float32)
    for t in range(1, len(each.frames)):
        move = np.linalg.inv(each.poses[t - 1]) @ each.poses[t]
        rows[t, 0:3], rows[t, 3:6] = move[:3, 3], rotation_vector(move[:3, :3])
    ahead = each.poses[:, :3, 2]
    rows[:, 7] = np.arcsin(np.clip(-ahead[:, 1], -1, 1))  # the synthetic camera never rolls
    rows[1:, 8] = np.diff(each.times)
    rows[:, 9] = 1
    rows[0] = 0
    return rows


def rotation_vector(matrix: np.ndarray) -> np.ndarray:
    """Axis times angle; for the small angles between frames."""
    skew = np.array([matrix[2, 1] - matrix[1, 2], matrix[0, 2] - matrix[2, 0], matrix[1, 0] - matrix[0, 1]]) / 2
    sine = np.linalg.norm(skew)
    return skew * (np.arctan2(sine, (np.trace(matrix) - 1) / 2) / sine if sine > 1e-12 else 1)


def moved(rows: np.ndarray, shift: int) -> np.ndarray:
    """The rows `shift` frames later; what has no row is not valid."""
    out = np.zeros_like(rows)
    if shift >= 0:
        out[shift:] = rows[: len(rows) - shift]
    else:
        out[:shift] = rows[-shift:]
    return out


def divisors_of(height: int, width: int) -> list[int]:
    divisors = [1]
    while (d := divisors[-1] * 2) <= min(height, width) // 3 and height % d == 0 and width % d == 0:
        divisors.append(d)
    return divisors


def shrunk(frames: np.ndarray, factor: int) -> np.ndarray:
    """By halves: means of four pixels, halves rounded up."""
    while factor > 1:
        n, height, width, _ = frames.shape
        fours = frames.reshape(n, height // 2, 2, width // 2, 2, 3).astype(np.float64)
        frames, factor = np.floor(fours.mean((2, 4)) + 0.5).astype(np.uint8), factor // 2
    return frames


def statistics(rows: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    known = rows[rows[:, list(names).index("valid")] == 1].astype(np.float64)
    std = known.std(0)
    is_constant = std <= 1e-6 * np.maximum(1, np.abs(known).max(0))
    return {
        "mean": known.mean(0).tolist(),
        "std": np.where(is_constant, 1, std).tolist(),
        "low": np.percentile(known, 0.1, axis=0).tolist(),
        "high": np.percentile(known, 99.9, axis=0).tolist(),
        "brisk": np.percentile(np.abs(known), 90, axis=0).tolist(),
        "constant": [name for name, constant in zip(names, is_constant) if constant],
    }


def baselines(films: Sequence[Film], splits: Sequence[str], mean_frame: np.ndarray) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for split in dict.fromkeys(splits):
        frames = [each.frames.astype(np.int16) for each, its in zip(films, splits) if its == split]
        copied = np.concatenate([np.abs(np.diff(each, axis=0)).reshape(-1) for each in frames])
        mean = np.concatenate([np.abs(each[1:] - mean_frame.astype(np.int16)).reshape(-1) for each in frames])
        found[split] = {"persistence": copied.mean() / 127.5, "mean_frame": mean.mean() / 127.5}
    return {split: {name: float(value) for name, value in each.items()} for split, each in found.items()}
