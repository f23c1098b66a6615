"""How a run is: the doctor's findings, where the time of a step went, numbers per layer over steps."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np

from rung.doctor.history import read, tables_from_rows
from rung.doctor.report import report_of
from rung.errors import RunError
from rung.runs.metrics import read_tables
from rung.runs.paths import walk
from rung.runs.query import Run, nearest, ref

SETTLED = 20  # steps in which caches fill and kernels are compiled, as the doctor counts them
# What a step is made of, in its order. Copies to the device are made beside it: a step that waits for one counts it.
PARTS = ("wait_s", "forward_backward_s", "update_s", "other_s")
BESIDE = ("eval_s", "save_s", "sample_s")  # between steps
REMOVABLE = ("wait_s", *BESIDE)
_MOST_COLUMNS = 400  # of a heat map


def doctor(run: Run) -> dict[str, Any]:
    """What `rung doctor --json` says, the captures of the run, and what their replays found."""
    name = ref(run.path, run.id)
    report = report_of(read(run))
    report = replace(report, findings=[finding.at(run.id, name) for finding in report.findings])
    return {**report.to_dict(name), "captures": captures(run), "replays": replays(run)}


def replays(run: Run) -> list[dict[str, Any]]:
    """What `rung replay` found, the last time for each step."""
    found = {event.get("step"): event for event in run.events("replay")}
    return [{name: event.get(name) for name in ("step", "text", "unix_s")} for event in found.values()]


def captures(run: Run) -> list[dict[str, Any]]:
    """Step and files of each capture, and the command that replays it."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(RunError, OSError):
        for name in walk(run.path, "captures"):
            folder = name.split("/")[1]
            if folder.isdecimal():
                found.setdefault(folder, []).append(name)
    at = ref(run.path, run.id)
    return [
        {"step": int(step), "files": sorted(files), "command": f"rung replay {at}@{int(step)}"}
        for step, files in sorted(found.items(), key=lambda one: int(one[0]))
    ]


def clock(run: Run) -> dict[str, Any]:
    """Milliseconds of each part of a step, and how much faster a run would be without each wait."""
    names = [*PARTS, "copy_s", *BESIDE, "step_s"]
    arrays = run.arrays(names)
    steps = arrays.columns["step_s"][1]
    num_left_out = SETTLED if len(steps) > 2 * SETTLED else 0
    total = _finite_sum(steps[num_left_out:])
    if not total:
        return {"num_steps": 0, "step_ms": None, "parts": [], "gains": [], "problem": f"{run.id} recorded no step_s"}
    num_steps = len(steps) - num_left_out
    parts = []
    seconds: dict[str, float] = {}
    for name in names[:-1]:
        values = arrays.columns[name][1][num_left_out:]
        finite = values[np.isfinite(values)]
        if not len(finite):
            continue
        seconds[name] = float(finite.sum())
        low, middle, high = np.quantile(finite, [0.05, 0.5, 0.95]).tolist()
        parts.append({
            "name": name.removesuffix("_s"), "is_of_step": name in PARTS, "mean_ms": 1e3 * seconds[name] / num_steps,
            "p5_ms": 1e3 * low, "p50_ms": 1e3 * middle, "p95_ms": 1e3 * high, "share": seconds[name] / total,
        })  # fmt: skip
    whole = total + sum(seconds.get(name, 0.0) for name in BESIDE)
    gains = []
    for name in REMOVABLE:
        saved = seconds.get(name, 0.0)
        if 0 < saved < whole:
            gains.append({"name": name.removesuffix("_s"), "saved_s": saved, "speedup": whole / (whole - saved)})
    return {
        "num_steps": num_steps,
        "num_left_out": num_left_out,
        "step_ms": 1e3 * total / num_steps,
        "parts": parts,
        "gains": sorted(gains, key=lambda one: -one["saved_s"]),
    }


def _finite_sum(values: np.ndarray) -> float:
    return float(values[np.isfinite(values)].sum())


def layers(run: Run, kind: str = "", metric: str = "") -> dict[str, Any]:
    """One number per layer and step, as a heat map draws it: of several steps in one column the largest."""
    found = tables_from_rows(read_tables(run.path / "tables"))
    known = {name: sorted(table.columns) for name, table in found.items() if len(table.steps)}
    if not known:
        return {"kinds": {}, "kind": None, "metric": None, "metrics": [], "steps": [], "layers": [], "values": []}
    kind = kind or ("tensors" if "tensors" in known else next(iter(known)))
    if kind not in known:
        raise RunError(f"{run.id} has no table {kind}; {nearest(kind, list(known))}", code="no-metric")
    metric = metric or ("grad" if "grad" in known[kind] else known[kind][0])
    if metric not in known[kind]:
        raise RunError(f"table {kind} of {run.id} has no {metric}; {nearest(metric, known[kind])}", code="no-metric")
    table = found[kind]
    steps, values = table.steps, table.columns[metric]
    if len(steps) > _MOST_COLUMNS:
        edges = (np.arange(_MOST_COLUMNS) * len(steps)) // _MOST_COLUMNS
        bad = np.add.reduceat((~np.isfinite(values)).astype(np.int64), edges, axis=0) > 0
        highest = np.fmax.reduceat(values, edges, axis=0)
        steps, values = steps[edges], np.where(bad, np.nan, highest)
    return {
        "kinds": known,
        "kind": kind,
        "metric": metric,
        "metrics": known[kind],
        "steps": steps.tolist(),
        "layers": table.names,
        "values": values.T.tolist(),
    }
