"""What prepared data is like, before anything is trained on it: `rung data world --report`.

Figures are gathered from the store alone, judged by a few stated limits, and written as a page with pictures and a file
of numbers. Nothing is changed in the store, and the page is whole or absent: it is written beside its place and moved
there last.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rung.data.store import Store, write_report
from rung.errors import DataError
from rung.recipe import Report
from rung.recipes.world.sources.episode import onward
from rung.recipes.world.stream import array_of
from rung.recipes.world.survey.alignment import Alignment, Span, align, film_motion
from rung.recipes.world.survey.figures import axes_of, blemishes, channel_figures, directions, moving_channels, timing
from rung.recipes.world.survey.findings import judge
from rung.recipes.world.survey.page import page, summary
from rung.report.blocks import Picture, markdown

MOST_ROWS = 20_000  # of which motion is estimated, spread over the store
SPAN = 2000  # rows of a record that are looked at together


def survey(store: Store, out: Path, report: Report) -> str:
    """Writes report.md, report.json and pictures into `out`, in place of what was there; returns a summary."""
    figures = measure(store, report)
    figures["findings"] = [finding._asdict() for finding in judge(figures)]
    shown = page(figures)
    files = {"report.md": markdown(shown), "report.json": json.dumps(figures, indent=1) + "\n"}
    files |= {block.path: block.svg for block in shown.blocks if isinstance(block, Picture)}
    write_report(out, {name: text.encode() for name, text in files.items()})
    return summary(figures)


def measure(store: Store, report: Report) -> dict[str, Any]:
    """All figures of a store, as plain data."""
    if not len(store.arrays["frames"]) or "train" not in store.splits:
        raise DataError(
            f"{store.path} has no training frames to report on; prepare it again with more data", code="no-data"
        )
    info, controls, times = store.info, store.arrays["controls"], store.arrays["times"]
    names, constant = info["controls"], info["statistics"]["constant"]
    is_valid = np.asarray(controls[:, names.index("valid")] > 0) if "valid" in names else np.ones(len(controls), bool)
    axes = axes_of(info)
    has_moved = np.any([axis.signs(controls) != 0 for axis in axes], axis=0) & is_valid
    ends, splits, known = store.starts + store.lengths, {}, {}
    for split in store.splits:
        records = store.split(split)
        rows = np.concatenate([np.zeros(0, np.int64), *(np.arange(store.starts[k], ends[k]) for k in records)])
        known[split] = rows[is_valid[rows]]
        splits[split] = {
            "records": len(records),
            "frames": int(store.lengths[records].sum()),
            "seconds": sum(float(times[ends[k] - 1] - times[store.starts[k]]) for k in records),
            "episodes": sorted({store.index[k]["episode"] for k in records}),
        }
    return {
        "store": store.path.name,
        "fingerprint": store.fingerprint,
        "size": [info["width"], info["height"]],
        "source": info.get("source", ""),
        "rate_hz": info["rate_hz"],
        "control_kind": info["control_kind"],
        "control_lag": info.get("settings", {}).get("control_lag"),
        "records": [
            {key: record.get(key) for key in ("label", "episode", "split", "start", "length")} for record in store.index
        ],
        "splits": splits,
        "nearest": _nearest_splits(store),
        "coverage": {split: directions(controls[rows], axes) for split, rows in known.items() if len(rows)},
        "pairs": [axis.ways for axis in axes],
        "constant": list(constant),
        "channels": {
            name: channel_figures(controls[known["train"], k], known["train"])
            for k, name in enumerate(names)
            if name not in constant and name != "valid" and len(known["train"])
        },
        "moving": [names[k] for k in moving_channels(info)],
        "invalid": int((~is_valid).sum()),
        "differs": _differing(store, known),
        "timing": timing(times, store.starts, store.lengths),
        "alignment": asdict(_alignment(store, is_valid, report)),
        "frames": blemishes(store, coarse(store, 12), has_moved, report),
        "baselines": info.get("baselines", {}),
        "dropped": info.get("dropped", {}),
    }


def coarse(store: Store, least: int) -> np.ndarray:
    """All frames at the coarsest size whose smaller side has at least `least` pixels, or as many as there are."""
    height, width = store.info["height"], store.info["width"]
    divisor = max([d for d in store.info["divisors"] if min(height, width) // d >= least], default=1)
    frames = store.arrays[array_of(divisor)]
    factor = min(frames.shape[1:3]) // least
    if factor < 2:
        return frames
    high, wide = frames.shape[1] // factor, frames.shape[2] // factor  # odd sizes have no coarse frames: cut the edge
    out = np.empty((len(frames), high, wide, 3), np.uint8)
    for at in range(0, len(frames), 256):
        block = np.asarray(frames[at : at + 256, : high * factor, : wide * factor], np.float32)
        out[at : at + 256] = block.reshape(-1, high, factor, wide, factor, 3).mean((2, 4))
    return out


def _alignment(store: Store, is_valid: np.ndarray, report: Report) -> Alignment:
    spans = [
        Span(record["label"], record["start"] + at, min(SPAN, record["length"] - at))
        for record in store.index
        for at in range(0, record["length"], SPAN)
    ]
    keep = max(1, round(len(spans) * min(1, MOST_ROWS / max(1, int(store.lengths.sum())))))
    spans = [spans[k] for k in np.linspace(0, len(spans) - 1, keep).astype(int)]
    total = sum(span.length for span in spans)
    motion = film_motion(
        [coarse(store, 12), coarse(store, 24)],
        spans,
        lambda done: report("estimating how the pictures move", done, total),
    )
    moving = moving_channels(store.info)
    controls = np.asarray(store.arrays["controls"][:, moving], np.float64)
    return align(motion, controls, is_valid, [store.info["controls"][k] for k in moving], spans)


def _nearest_splits(store: Store) -> dict[str, Any] | None:
    """The smallest pause between two records of one recording that are in different splits; None where there is none.

    A recording may give several episodes; its rows follow each other, those in no record between them.
    """
    found = None
    by_source: dict[int, list[int]] = {}
    for k in np.argsort(store.starts, kind="stable"):
        by_source.setdefault(store.index[k].get("source", store.index[k]["episode"]), []).append(int(k))
    for records in by_source.values():
        first, last = store.starts[records[0]], store.starts[records[-1]] + store.lengths[records[-1]]
        clock = onward(store.arrays["times"][first:last])
        for a, b in itertools.pairwise(records):
            pair = [store.index[a]["split"], store.index[b]["split"]]
            gap = float(clock[store.starts[b] - first] - clock[store.starts[a] + store.lengths[a] - 1 - first])
            if pair[0] != pair[1] and (found is None or gap < found["seconds"]):
                found = {"seconds": gap, "splits": pair, "label": store.index[a]["label"]}
    return found


def _differing(store: Store, known: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Channels whose mean or spread in an eval split is far from that in training."""
    found = []
    statistics, controls = store.info["statistics"], store.arrays["controls"]
    for split, rows in known.items():
        for k in moving_channels(store.info) if split != "train" and len(rows) else ():
            mean, std = float(controls[rows, k].mean()), float(controls[rows, k].std())
            shift, ratio = (mean - statistics["mean"][k]) / statistics["std"][k], std / statistics["std"][k]
            if abs(shift) > 0.5 or not 0.5 <= ratio <= 2:
                found.append({"split": split, "channel": store.info["controls"][k], "shift": shift, "ratio": ratio})
    return found
